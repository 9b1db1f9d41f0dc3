"""State on disk: blocks of tokens in a folder, found again by what they are made of. Never imports MLX."""
