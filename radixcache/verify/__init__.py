"""Restored state held against a cold run."""
