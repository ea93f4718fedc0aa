"""Behaviours of a strategy by theme; importing this package fills their table."""
