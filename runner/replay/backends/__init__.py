"""The caches that a replay compares, a file each."""
