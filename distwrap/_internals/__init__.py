"""All private names of torch, CPython and other packages that distwrap uses."""
