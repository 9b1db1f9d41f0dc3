"""A look at the tree: a plain description, and that as text, picture, page and JSON. Never imports MLX."""
