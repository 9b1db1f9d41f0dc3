"""Replay: the same requests through one cache after another, and what each of them cost."""

#: The caches that a replay compares, by name.
CACHE_NAMES = ("none", "single", "mlx-lm", "radix")
