"""What can be asked of a cache that serves: explanations, hints, counters, metrics, traces."""
