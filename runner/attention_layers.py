"""Model types whose layers all attend: full attention, sliding windows, latent attention. No MLX.

Each function takes a configuration and yields its layers. Source: mlx_lm.models, mlx-lm 0.32.2.
"""

from collections.abc import Callable, Iterator

from runner.layer_kinds import Layer, Span, State, Window, attention, latent_span, pair
from runner.model_fields import Config, whole_number


def full(config: Config) -> Iterator[Layer]:
    for _ in range(config.layers):
        yield Span(attention(config))


def all_heads(config: Config) -> Iterator[Layer]:
    """As many heads of keys and values as of queries, whatever the configuration says."""
    for _ in range(config.layers):
        yield Span(pair(config.query_heads, config.head_dim))


def one_head(config: Config) -> Iterator[Layer]:
    """Multi-query attention, unless a number of heads is given."""
    heads = config.get("num_key_value_heads", default=1 if config.value("multi_query", True) else config.query_heads)
    for _ in range(config.layers):
        yield Span(pair(heads, config.hidden // config.query_heads))


def by_hidden(config: Config) -> Iterator[Layer]:
    """Heads share the width equally; a head_dim that is given does not count."""
    for _ in range(config.layers):
        yield Span(pair(config.kv_heads, config.hidden // config.query_heads))


def latent(config: Config) -> Iterator[Layer]:
    """MLA that keeps the latent vector and the rotary part of the keys."""
    for _ in range(config.layers):
        yield latent_span(config)


def mistral3(config: Config) -> Iterator[Layer]:
    """The text part is another model, whose windows are cached like full attention here."""
    return latent(config) if config.text_type == "mistral4" else full(config)


def expanded_latent(config: Config) -> Iterator[Layer]:
    """MLA whose cache holds the expanded keys and values of all heads."""
    key_dim = config.get("qk_nope_head_dim") + config.get("qk_rope_head_dim")
    value_dim = config.get("v_head_dim", default=config.hidden // config.query_heads)
    for _ in range(config.layers):
        yield Span(pair(config.query_heads, key_dim, value_dim))


def indexed_latent(config: Config) -> Iterator[Layer]:
    """MLA with an index of keys beside it, whose values are never looked at but stored as zeros of the same width."""
    index_dim = config.get("index_head_dim")
    for _ in range(config.layers):
        yield latent_span(config)
        yield Span(((1, index_dim), (1, index_dim)))


def two_latents(config: Config) -> Iterator[Layer]:
    """Two attentions per layer (longcat)."""
    for _ in range(2 * config.layers):
        yield latent_span(config)


def two_latents_and_ids(config: Config) -> Iterator[Layer]:
    """As `two_latents`, and the last token ids (int64) for the n-gram embeddings."""
    yield State(other_bytes=8 * (config.get("emb_neighbor_num") - 1))
    yield from two_latents(config)


def typed(
    otherwise: Callable[[int], str] = lambda index: "full_attention",
) -> Callable[[Config], Iterator[Layer]]:
    """Windows and full attention by the list `layer_types`; `otherwise` is a layer's kind where there is no list."""

    def layers(config: Config) -> Iterator[Layer]:
        kinds = config.layer_types() or [otherwise(index) for index in range(config.layers)]
        # The last layers may read the keys and values of others.
        for kind in kinds[: len(kinds) - config.get("num_kv_shared_layers", default=0)]:
            if kind == "sliding_attention":
                yield Window(attention(config), config.get("sliding_window"))
            else:
                yield Span(attention(config))

    return layers


def chunked(config: Config) -> Iterator[Layer]:
    """Llama 4: every fourth layer attends fully, the others within a chunk; that cache may be a forward pass longer."""
    for index in range(config.layers):
        is_full = (index + 1) % 4 == 0
        yield Span(attention(config)) if is_full else Window(attention(config), config.get("attention_chunk_size"))


def patterned(config: Config) -> Iterator[Layer]:
    """Windows with a full layer every `sliding_window_pattern` layers."""
    every = config.get("sliding_window_pattern")
    for index in range(config.layers):
        if (index + 1) % every == 0:
            yield Span(attention(config))
        else:
            yield Window(attention(config), config.get("sliding_window", "window_size"))


def gemma4(config: Config) -> Iterator[Layer]:
    every = config.get("sliding_window_pattern")
    kinds = config.layer_types() or [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(config.layers)
    ]
    shared_heads = config.value("attention_k_eq_v") and config.value("num_global_key_value_heads") is not None
    heads = config.get("num_global_key_value_heads") if shared_heads else config.kv_heads
    full = pair(heads, config.get("global_head_dim", default=0) or config.head_dim)
    for kind in kinds[: config.layers - config.get("num_kv_shared_layers", default=0)]:
        yield Window(attention(config), config.get("sliding_window")) if kind == "sliding_attention" else Span(full)


def exaone4(config: Config) -> Iterator[Layer]:
    pattern = config.layer_types("sliding_window_pattern") or ["G"]
    for index in range(config.layers):
        is_local = pattern[index % len(pattern)] == "L"
        yield Window(attention(config), config.get("sliding_window")) if is_local else Span(attention(config))


def mimo_v2(config: Config) -> Iterator[Layer]:
    for is_sliding in config.value("hybrid_layer_pattern", ()):
        if is_sliding:
            heads = config.get("swa_num_key_value_heads")
            dims = config.get("swa_head_dim"), config.get("swa_v_head_dim")
            yield Window(pair(heads, *dims), config.get("sliding_window_size"))
        else:
            yield Span(pair(config.kv_heads, config.head_dim, config.get("v_head_dim")))


def looped(config: Config) -> Iterator[Layer]:
    """Every layer is passed `num_loops` times and keeps the keys and values of each."""
    for _ in range(config.get("num_loops")):
        yield from full(config)


def looped_windows(config: Config) -> Iterator[Layer]:
    yield from full(config)
    for _ in range((config.get("loop_num") - 1) * config.layers):
        yield Window(attention(config), config.get("loop_window_size"))


def reused_tail(config: Config) -> Iterator[Layer]:
    """AFM: the last layers read the keys and values of one before."""
    for _ in range(config.layers - config.get("num_kv_reuse_layers")):
        yield Span(pair(config.kv_heads, config.hidden // config.query_heads))


def dbrx(config: Config) -> Iterator[Layer]:
    heads = config.part("attn_config").get("kv_n_heads")
    for _ in range(config.layers):
        yield Span(pair(heads, config.hidden // config.query_heads))


def plamo(config: Config) -> Iterator[Layer]:
    heads = config.query_heads // config.get("n_shared_head")
    for _ in range(config.layers):
        yield Span(pair(heads, config.hidden // config.query_heads))


def openelm(config: Config) -> Iterator[Layer]:
    for heads in config.value("num_kv_heads", ()):
        yield Span(pair(whole_number(heads, "num_kv_heads"), config.get("head_dim")))


def nemotron_nas(config: Config) -> Iterator[Layer]:
    for block in config.value("block_configs", ()):
        group = (block.get("attention") or {}).get("n_heads_in_group")
        if group:
            yield Span(pair(config.query_heads // group, config.hidden // config.query_heads))


def minimax_m3(config: Config) -> Iterator[Layer]:
    """Sparse layers keep an index of one head beside keys and values."""
    for kind in config.layer_types() or ["full_attention"] * config.layers:
        yield Span(attention(config))
        if kind == "sparse_attention":
            yield Span(((1, config.get("index_head_dim", "head_dim")),))
