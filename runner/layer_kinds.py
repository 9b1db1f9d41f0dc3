"""What a layer of a model keeps: a span that grows by the token, a window of the last tokens, a state of a fixed size.

Span     grows by the token: keys and values of full attention, or the latent vector of MLA
Window   keys and values of the last so many tokens
State    a fixed size, whatever the length: recurrent and linear-attention layers, convolutions
"""

from dataclasses import dataclass

from runner.model_fields import Config

#: Arrays of one layer, as (heads, elements per head).
Heads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Span:
    """State of each token: keys and values."""

    heads: Heads


@dataclass(frozen=True)
class Window:
    """State of the last `tokens` tokens."""

    heads: Heads
    tokens: int


@dataclass(frozen=True)
class State:
    """State of a fixed size: elements in the model's dtype, elements that are float32 in any case, bytes of neither."""

    elements: int = 0
    float32_elements: int = 0
    other_bytes: int = 0


Layer = Span | Window | State


def pair(heads: int, key_dim: int, value_dim: int | None = None) -> Heads:
    return ((heads, key_dim), (heads, key_dim if value_dim is None else value_dim))


def attention(config: Config) -> Heads:
    return pair(config.kv_heads, config.head_dim)


def latent_span(config: Config) -> Span:
    return Span(((1, config.get("kv_lora_rank")), (1, config.get("qk_rope_head_dim"))))
