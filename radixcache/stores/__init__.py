"""Stores: state in blocks, on disk or in Redis, found by the tokens that it belongs to. Never imports MLX."""
