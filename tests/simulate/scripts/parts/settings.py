"""Settings that the script changes for its rank."""

LR = 0.1
STEPS = 6
SAMPLES_PER_RANK = 3
seed = 7
rank = 0
world_size = 1


def load(environ):
    global rank, world_size
    rank, world_size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
