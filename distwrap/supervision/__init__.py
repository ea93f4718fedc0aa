"""What ranks tell each other besides collectives: failures, where they are, and whether they move."""
