"""Supervision of a run: its ranks tell each other of failures, where they are, and whether they move."""
