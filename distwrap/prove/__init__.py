"""`distwrap prove`: whether a loop computes the same on several ranks as in one process, and if not, what differs."""
