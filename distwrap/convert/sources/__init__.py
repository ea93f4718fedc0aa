"""Sources of a conversion: a file for each way in which scripts train."""
