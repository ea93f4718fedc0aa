"""Network between nodes: interfaces, connectivity, and the store in which ranks meet."""
