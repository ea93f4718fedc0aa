"""The network between nodes: interfaces, connectivity, and the store in which the ranks meet."""
