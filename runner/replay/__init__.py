"""Replay: the same requests through one cache after another, and what each of them cost."""
