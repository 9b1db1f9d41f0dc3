"""Who may touch the cache now: the lock, and stretches that Ctrl-C does not cut in two."""
