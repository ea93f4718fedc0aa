"""Where the time of a run goes: measured on each rank, compared over the ranks, said with what to change."""
