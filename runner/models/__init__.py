"""Language models: the demo model, tiny random ones, loading; and how many bytes the state of a model takes.

This file never imports MLX: commands read it before they know whether a model is needed.
"""

from dataclasses import dataclass

KV_BITS, KV_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
#: How a message ends where the user has to give a figure.
INSTEAD = "Give the size yourself with --bytes-per-token (and --bytes-per-checkpoint)."


class ModelConfigError(ValueError):
    """A configuration from which bytes cannot be computed; the message says what to give instead."""


@dataclass(frozen=True)
class ModelBytes:
    """How many bytes the state of a model takes."""

    model_type: str
    token_bytes: int  # of one token, over all layers that grow by the token
    state_bytes: int  # of recurrent state, linear attention and convolutions, at any length
    windows: tuple[tuple[int, int], ...]  # by their length: tokens, bytes of one token over all layers of that length
    dtype: str  # of the cache if it is not quantized
    stored_token_bytes: int | None = None  # of one token that is not live; None: token_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint with full windows; 0 if there are only spans."""
        return self.state_bytes + sum(tokens * token_bytes for tokens, token_bytes in self.windows)

    def __str__(self) -> str:
        checkpoint = f", {self.checkpoint_bytes:,} bytes per checkpoint" if self.checkpoint_bytes else ""
        return f"{self.model_type} in {self.dtype}: {self.token_bytes:,} bytes per token{checkpoint}"
