"""What can be asked of a cache that serves: explanations, counters, metrics, traces, and a view of its tree."""
