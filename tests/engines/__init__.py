"""Tests of other engines, each run by `make nightly` in an environment that has its package."""
