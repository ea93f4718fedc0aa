"""Real launchers and real networks on one machine: Slurm, MPI, torchrun, network namespaces as hosts."""
