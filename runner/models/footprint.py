"""ModelBytes: what the state of a model takes. This file never imports MLX."""

from dataclasses import dataclass

#: How a message ends where a figure has to come from the user.
INSTEAD = "Give the size yourself with --bytes-per-token (and --bytes-per-checkpoint)."


class ModelConfigError(ValueError):
    """A configuration that bytes cannot be worked out from; the message says what to give instead."""


@dataclass(frozen=True)
class ModelBytes:
    """What a model's state takes.

    Attributes:
        model_type: as the configuration names it.
        token_bytes: of one token over all layers that grow by the token; 0 where none does.
        state_bytes: of recurrent state, linear attention and convolutions, whatever the length.
        windows: the sliding windows by their length, as (tokens, bytes of one token over all layers of that length).
        dtype: of the cache where it is not quantized.
    """

    model_type: str
    token_bytes: int
    state_bytes: int
    windows: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes once all windows are full; 0 where there is nothing but spans."""
        return self.checkpoint_bytes_at(max((tokens for tokens, _ in self.windows), default=0))

    def checkpoint_bytes_at(self, offset: int) -> int:
        """What a checkpoint at this offset takes: windows hold no more tokens than there are."""
        return self.state_bytes + sum(min(tokens, offset) * token_bytes for tokens, token_bytes in self.windows)

    def __str__(self) -> str:
        checkpoint = f", {self.checkpoint_bytes:,} bytes per checkpoint" if self.checkpoint_bytes else ""
        return f"{self.model_type} in {self.dtype}: {self.token_bytes:,} bytes per token{checkpoint}"
