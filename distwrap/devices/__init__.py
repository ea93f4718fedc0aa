"""Accelerators: which kinds there are, which device is ours, and how many CPUs and threads a rank may use."""
