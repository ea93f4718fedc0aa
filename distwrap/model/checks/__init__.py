"""Checks that the ranks train the same model, each on its own data, and errors in the user's words."""
