"""launcher="ray", on real clusters of Ray."""
