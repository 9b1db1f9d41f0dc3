"""Drafting: propose earlier tokens again, and decide how many tokens to check in one pass. Never imports MLX."""
