"""Reports of where the time of a run goes: measured on each rank, compared between ranks, with advice."""
