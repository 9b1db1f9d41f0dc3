"""One file per cache class of mlx-lm: how its state is cut, joined and copied, and what a snapshot of it holds."""
