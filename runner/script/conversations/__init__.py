"""Recorded conversations: what they are, readers for the formats they come in, and a built-in set."""
