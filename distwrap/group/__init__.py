"""The process group and this process's place in it."""
