"""Drafting: propose what was said before, and decide how many tokens to check in one pass. Never MLX."""
