"""Every private name of torch, CPython and cloudpickle that distwrap uses, one module for each of the three."""
