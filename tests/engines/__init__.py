"""Tests of other engines, each run by `make test-engines` in an environment that has its package."""
