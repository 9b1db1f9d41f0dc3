"""Where a request goes: what each replica stores, what waits there, and the decision. Plain data, no clock, no MLX."""
