"""How long a test waits for what should come at once."""

# A guard against an end by some other, longer limit (of a collective, a sleep, a grace), and no measure of speed: what
# a test holds to it takes a second or two on an idle machine, and must pass on one whose cores are busy.
SOON = 60.0
