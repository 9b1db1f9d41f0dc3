"""Which state the layers of each model type keep per token and per checkpoint, as mlx-lm lays it out. No MLX.

A type is a line in `TYPES`: a function from the configuration to its layers. A layer is one of

    Span     grows by the token: keys and values of full attention, or the latent vector of MLA
    Window   keys and values of the last so many tokens
    State    a fixed size, whatever the length: recurrent and linear-attention layers, convolutions

Source: mlx_lm.models, mlx-lm 0.32.2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runner.model_fields import INSTEAD, Config, ModelConfigError, whole_number

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


def layers_of(config: Config) -> list[Layer]:
    """The layers' state.

    Raises:
        ModelConfigError: the type is not known, or a field is missing or of the wrong kind.
    """
    if config.model_type not in TYPES:
        raise ModelConfigError(
            f"model_type {config.model_type!r} is not known here ({len(TYPES)} types are). {INSTEAD}"
        )
    try:
        layers = list(TYPES[config.model_type](config))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # A list that is too short or none at all, no heads to share the width among ...
        raise ModelConfigError(
            f"model_type {config.model_type!r}: its fields do not fit together ({type(error).__name__}: {error})."
            f" {INSTEAD}"
        ) from error
    if not layers:
        raise ModelConfigError(f"model_type {config.model_type!r}: no layer keeps any state. {INSTEAD}")
    return layers


# Kinds of models ------------------------------------------------------------------------------------------------------


def _pair(heads: int, key_dim: int, value_dim: int | None = None) -> Heads:
    return ((heads, key_dim), (heads, key_dim if value_dim is None else value_dim))


def _attention(config: Config) -> Heads:
    return _pair(config.kv_heads, config.head_dim)


def _full(config: Config) -> Iterator[Layer]:
    for _ in range(config.layers):
        yield Span(_attention(config))


def _all_heads(config: Config) -> Iterator[Layer]:
    """As many heads of keys and values as of queries, whatever the configuration says."""
    for _ in range(config.layers):
        yield Span(_pair(config.query_heads, config.head_dim))


def _one_head(config: Config) -> Iterator[Layer]:
    """Multi-query attention, unless a number of heads is given."""
    heads = config.get("num_key_value_heads", default=1 if config.value("multi_query", True) else config.query_heads)
    for _ in range(config.layers):
        yield Span(_pair(heads, config.hidden // config.query_heads))


def _by_hidden(config: Config) -> Iterator[Layer]:
    """Heads share the width equally; a head_dim that is given does not count."""
    for _ in range(config.layers):
        yield Span(_pair(config.kv_heads, config.hidden // config.query_heads))


def _latent(config: Config) -> Iterator[Layer]:
    """MLA that keeps the latent vector and the rotary part of the keys."""
    for _ in range(config.layers):
        yield _latent_span(config)


def _latent_span(config: Config) -> Span:
    return Span(((1, config.get("kv_lora_rank")), (1, config.get("qk_rope_head_dim"))))


def _mistral3(config: Config) -> Iterator[Layer]:
    """The text part is another model, whose windows are cached like full attention here."""
    return _latent(config) if config.text_type == "mistral4" else _full(config)


def _expanded_latent(config: Config) -> Iterator[Layer]:
    """MLA whose cache holds the expanded keys and values of all heads."""
    key_dim = config.get("qk_nope_head_dim") + config.get("qk_rope_head_dim")
    value_dim = config.get("v_head_dim", default=config.hidden // config.query_heads)
    for _ in range(config.layers):
        yield Span(_pair(config.query_heads, key_dim, value_dim))


def _indexed_latent(config: Config) -> Iterator[Layer]:
    """MLA with an index of keys beside it, whose values are never looked at but stored as zeros of the same width."""
    index_dim = config.get("index_head_dim")
    for _ in range(config.layers):
        yield _latent_span(config)
        yield Span(((1, index_dim), (1, index_dim)))


def _two_latents(config: Config) -> Iterator[Layer]:
    """Two attentions per layer (longcat)."""
    for _ in range(2 * config.layers):
        yield _latent_span(config)


def _two_latents_and_ids(config: Config) -> Iterator[Layer]:
    """As `_two_latents`, and the last token ids (int64) for the n-gram embeddings."""
    yield State(other_bytes=8 * (config.get("emb_neighbor_num") - 1))
    yield from _two_latents(config)


def _typed(
    otherwise: Callable[[int], str] = lambda index: "full_attention",
) -> Callable[[Config], Iterator[Layer]]:
    """Windows and full attention by the list `layer_types`; `otherwise` is a layer's kind where there is no list."""

    def layers(config: Config) -> Iterator[Layer]:
        kinds = config.layer_types() or [otherwise(index) for index in range(config.layers)]
        # The last layers may read the keys and values of others.
        for kind in kinds[: len(kinds) - config.get("num_kv_shared_layers", default=0)]:
            if kind == "sliding_attention":
                yield Window(_attention(config), config.get("sliding_window"))
            else:
                yield Span(_attention(config))

    return layers


def _chunked(config: Config) -> Iterator[Layer]:
    """Llama 4: every fourth layer attends fully, the others within a chunk; that cache may be a forward pass longer."""
    for index in range(config.layers):
        is_full = (index + 1) % 4 == 0
        yield Span(_attention(config)) if is_full else Window(_attention(config), config.get("attention_chunk_size"))


def _patterned(config: Config) -> Iterator[Layer]:
    """Windows with a full layer every `sliding_window_pattern` layers."""
    every = config.get("sliding_window_pattern")
    for index in range(config.layers):
        if (index + 1) % every == 0:
            yield Span(_attention(config))
        else:
            yield Window(_attention(config), config.get("sliding_window", "window_size"))


def _gemma4(config: Config) -> Iterator[Layer]:
    every = config.get("sliding_window_pattern")
    kinds = config.layer_types() or [
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(config.layers)
    ]
    shared_heads = config.value("attention_k_eq_v") and config.value("num_global_key_value_heads") is not None
    heads = config.get("num_global_key_value_heads") if shared_heads else config.kv_heads
    full = _pair(heads, config.get("global_head_dim", default=0) or config.head_dim)
    for kind in kinds[: config.layers - config.get("num_kv_shared_layers", default=0)]:
        yield Window(_attention(config), config.get("sliding_window")) if kind == "sliding_attention" else Span(full)


def _exaone4(config: Config) -> Iterator[Layer]:
    pattern = config.layer_types("sliding_window_pattern") or ["G"]
    for index in range(config.layers):
        is_local = pattern[index % len(pattern)] == "L"
        yield Window(_attention(config), config.get("sliding_window")) if is_local else Span(_attention(config))


def _mimo_v2(config: Config) -> Iterator[Layer]:
    for is_sliding in config.value("hybrid_layer_pattern", ()):
        if is_sliding:
            heads = config.get("swa_num_key_value_heads")
            dims = config.get("swa_head_dim"), config.get("swa_v_head_dim")
            yield Window(_pair(heads, *dims), config.get("sliding_window_size"))
        else:
            yield Span(_pair(config.kv_heads, config.head_dim, config.get("v_head_dim")))


def _looped(config: Config) -> Iterator[Layer]:
    """Every layer is passed `num_loops` times and keeps the keys and values of each."""
    for _ in range(config.get("num_loops")):
        yield from _full(config)


def _looped_windows(config: Config) -> Iterator[Layer]:
    yield from _full(config)
    for _ in range((config.get("loop_num") - 1) * config.layers):
        yield Window(_attention(config), config.get("loop_window_size"))


def _reused_tail(config: Config) -> Iterator[Layer]:
    """AFM: the last layers read the keys and values of one before."""
    for _ in range(config.layers - config.get("num_kv_reuse_layers")):
        yield Span(_pair(config.kv_heads, config.hidden // config.query_heads))


def _dbrx(config: Config) -> Iterator[Layer]:
    heads = config.part("attn_config").get("kv_n_heads")
    for _ in range(config.layers):
        yield Span(_pair(heads, config.hidden // config.query_heads))


def _plamo(config: Config) -> Iterator[Layer]:
    heads = config.query_heads // config.get("n_shared_head")
    for _ in range(config.layers):
        yield Span(_pair(heads, config.hidden // config.query_heads))


def _openelm(config: Config) -> Iterator[Layer]:
    for heads in config.value("num_kv_heads", ()):
        yield Span(_pair(whole_number(heads, "num_kv_heads"), config.get("head_dim")))


def _nemotron_nas(config: Config) -> Iterator[Layer]:
    for block in config.value("block_configs", ()):
        group = (block.get("attention") or {}).get("n_heads_in_group")
        if group:
            yield Span(_pair(config.query_heads // group, config.hidden // config.query_heads))


def _minimax_m3(config: Config) -> Iterator[Layer]:
    """Sparse layers keep an index of one head beside keys and values."""
    for kind in config.layer_types() or ["full_attention"] * config.layers:
        yield Span(_attention(config))
        if kind == "sparse_attention":
            yield Span(((1, config.get("index_head_dim", "head_dim")),))


# Recurrent and linear-attention layers --------------------------------------------------------------------------------


def _mamba1(config: Config) -> State:
    inner = config.get("intermediate_size", "d_inner")
    state = config.get("state_size", "d_state")
    return State(elements=inner * (config.get("conv_kernel", "d_conv") - 1 + state))


def _mamba2(inner: int, heads: int, head_dim: int, state: int, groups: int, kernel: int) -> State:
    """A convolution over inputs and both projections of the state, in the model's dtype; the state in float32."""
    return State(
        elements=(kernel - 1) * (inner + 2 * groups * state),
        float32_elements=heads * head_dim * state,
    )


def _pure_mamba(config: Config) -> Iterator[Layer]:
    for _ in range(config.get("num_hidden_layers", "n_layer", "n_layers")):
        yield _mamba1(config)


def _pure_mamba2(config: Config) -> Iterator[Layer]:
    heads, dim = config.get("num_heads"), config.get("head_dim")
    state = config.get("ssm_state_size", "state_size")
    for _ in range(config.layers):
        yield _mamba2(heads * dim, heads, dim, state, config.get("n_groups"), config.get("conv_kernel"))


def _jamba(config: Config) -> Iterator[Layer]:
    kinds = config.layer_types("layers_block_type") or [
        "attention" if index % config.get("attn_layer_period") == config.get("attn_layer_offset") else "mamba"
        for index in range(config.layers)
    ]
    inner = config.get("mamba_expand") * config.hidden
    state = State(elements=inner * (config.get("mamba_d_conv") - 1 + config.get("mamba_d_state")))
    for kind in kinds:
        yield Span(_pair(config.kv_heads, config.hidden // config.query_heads)) if kind == "attention" else state


def _plamo2(config: Config) -> Iterator[Layer]:
    step = config.get("mamba_step")
    dim, heads = config.get("hidden_size_per_head"), config.get("mamba_num_heads")
    kernel, state = config.get("mamba_d_conv"), config.get("mamba_d_state")
    mamba = State(elements=(kernel - 1) * heads * dim, float32_elements=heads * dim * state)
    span = Span(_pair(config.kv_heads, dim))
    for index in range(config.layers):
        is_mamba = index != config.layers - 1 if config.layers <= step // 2 else index % step != step // 2
        yield mamba if is_mamba and config.value("mamba_enabled", True) else span


def _falcon_h1(config: Config) -> Iterator[Layer]:
    """A Mamba2 mixer and full attention side by side in every layer."""
    heads, dim = config.get("mamba_n_heads"), config.get("mamba_d_head")
    for _ in range(config.layers):
        yield _mamba2(
            config.get("mamba_d_ssm"),
            heads,
            dim,
            config.get("mamba_d_state"),
            config.get("mamba_n_groups"),
            config.get("mamba_d_conv"),
        )
        yield Span(_attention(config))


def _granite_hybrid(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        if kind == "attention":
            yield Span(_pair(config.kv_heads, config.hidden // config.query_heads))
        else:
            heads, dim = config.get("mamba_n_heads"), config.get("mamba_d_head")
            groups, kernel = config.get("mamba_n_groups"), config.get("mamba_d_conv")
            yield _mamba2(heads * dim, heads, dim, config.get("mamba_d_state"), groups, kernel)


def _nemotron_h(config: Config) -> Iterator[Layer]:
    names = {"mamba": "M", "attention": "*"}
    kinds = config.layer_types("hybrid_override_pattern")
    if kinds is None:
        listed = config.layer_types("layers_block_type") or config.layer_types() or []
        kinds = [names.get(kind, "-") for kind in listed]
    heads, dim = config.value("mamba_num_heads"), config.value("mamba_head_dim")
    for kind in kinds:
        if kind == "*":
            yield Span(_attention(config))
        elif kind == "M":
            state, groups = config.get("ssm_state_size"), config.get("n_groups")
            yield _mamba2(heads * dim, heads, dim, state, groups, config.get("conv_kernel"))


def _gated_delta(config: Config) -> State:
    """Gated delta net: a convolution over queries, keys and values, a matrix per value head in float32."""
    key_heads, value_heads = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    key_dim, value_dim = config.get("linear_key_head_dim"), config.get("linear_value_head_dim")
    width = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = config.get("linear_conv_kernel_dim")
    return State(elements=(kernel - 1) * width, float32_elements=value_heads * key_dim * value_dim)


def _qwen_next(config: Config) -> Iterator[Layer]:
    every = config.get("full_attention_interval")
    for index in range(config.layers):
        yield Span(_attention(config)) if (index + 1) % every == 0 else _gated_delta(config)


def _olmo_hybrid(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        yield _gated_delta(config) if kind == "linear_attention" else Span(_attention(config))


def _kimi_delta(heads: int, dim: int, kernel: int) -> State:
    """Kimi delta attention: a convolution for each of queries, keys and values, a matrix per head in float32."""
    return State(elements=3 * (kernel - 1) * heads * dim, float32_elements=heads * dim * dim)


def _kimi_linear(config: Config) -> Iterator[Layer]:
    linear = config.part("linear_attn_config")
    delta_layers = set(linear.value("kda_layers", ()))
    delta = _kimi_delta(linear.get("num_heads"), linear.get("head_dim"), linear.get("short_conv_kernel_size"))
    for number in range(1, config.layers + 1):
        yield delta if number in delta_layers else _latent_span(config)


def _is_global(config: Config, index: int) -> bool:
    """Ling's linear models: the last layer of each `layer_group_size` attends fully, and a short last group does."""
    group = config.get("layer_group_size")
    return (index + 1) % group == 0 or index >= config.layers // group * group


def _bailing_linear(config: Config) -> Iterator[Layer]:
    # The linear layers take their width from the hidden size, the full ones their own head_dim.
    heads, dim = config.query_heads, config.hidden // config.query_heads
    for index in range(config.layers):
        yield Span(_attention(config)) if _is_global(config, index) else State(elements=heads * dim * dim)


def _bailing_hybrid(config: Config) -> Iterator[Layer]:
    heads, dim = config.query_heads, config.head_dim
    for index in range(config.layers):
        yield _latent_span(config) if _is_global(config, index) else State(float32_elements=heads * dim * dim)


def _bailing_v3(config: Config) -> Iterator[Layer]:
    delta = _kimi_delta(config.query_heads, config.head_dim, config.get("short_conv_kernel_size"))
    for index in range(config.layers):
        yield _latent_span(config) if _is_global(config, index) else delta


def _rwkv7(config: Config) -> Iterator[Layer]:
    """Two shifted tokens and a matrix per head."""
    dim = config.get("head_dim")
    for _ in range(config.layers):
        yield State(elements=2 * config.hidden + config.hidden // dim * dim * dim)


def _recurrent_gemma(config: Config) -> Iterator[Layer]:
    """RG-LRU layers keep a convolution and a vector; attention is multi-query, within a window."""
    kinds = config.layer_types("block_types") or config.layer_types("_block_types") or []
    width = config.get("lru_width", default=config.hidden)
    for index in range(config.layers):
        if kinds and kinds[index % len(kinds)] == "attention":
            dim = config.hidden // config.query_heads
            yield Window(_pair(1, dim), config.get("attention_window_size"))
        else:
            # mlx-lm convolves over 4 tokens whatever conv1d_width says: three of them are kept, and the state.
            yield State(elements=4 * width)


def _lfm2(config: Config) -> Iterator[Layer]:
    full = config.value("full_attn_idxs")
    kinds = config.layer_types() or []
    for index in range(config.layers):
        is_full = index in full if full is not None else kinds[index] == "full_attention"
        if is_full:
            yield Span(_pair(config.kv_heads, config.hidden // config.query_heads))
        else:
            yield State(elements=(config.get("conv_L_cache") - 1) * config.hidden)


def _gear(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        if kind == "full_attention":
            yield Span(_attention(config))
        elif kind == "sliding_attention":
            yield Window(_attention(config), config.get("sliding_window"))
        else:
            # A convolution of keys and one of values.
            width = config.kv_heads * config.head_dim
            yield State(elements=2 * (config.get("conv_L_cache") - 1) * width)


def _baichuan_m1(config: Config) -> Iterator[Layer]:
    """Full and windowed attention, each with the last keys and values before their convolution."""
    windows = set(config.value("sliding_window_layers", ()))
    for index in range(config.layers):
        is_window = index in windows
        names = ("num_swa_attention_heads", "num_swa_key_value_heads") if is_window else ()
        queries = config.get(*names[:1], "num_attention_heads")
        heads = config.get(*names[1:], "num_key_value_heads")
        dims = _pair(heads, config.hidden // queries)
        yield State(elements=sum(count * dim for count, dim in dims))
        yield Window(dims, config.get("sliding_window")) if is_window else Span(dims)


TYPES: dict[str, Callable[[Config], Iterator[Layer]]] = {
    **dict.fromkeys(
        (
            # Grouped-query attention in every layer.
            "Klear", "apertus", "bailing_moe", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "gemma",
            "gemma2", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "hunyuan_v1_dense", "internlm3",
            "llama4_text", "mimo", "minimax", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2",
            "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "telechat3",
            # Their text part may have windows, but they are cached like full attention.
            "pixtral",
        ),
        _full,
    ),
    "mistral3": _mistral3,
    **dict.fromkeys(("cohere", "helium", "hunyuan", "internlm2", "lille-130m", "minicpm", "nanochat"), _by_hidden),
    **dict.fromkeys(("gpt2", "gpt_neox", "gptj", "phixtral", "qwen", "talkie"), _all_heads),
    "gpt_bigcode": _one_head,
    "afm7": _reused_tail,
    "dbrx": _dbrx,
    "nanbeige": _looped,
    "nemotron-nas": _nemotron_nas,
    "openelm": _openelm,
    "plamo": _plamo,
    # Latent attention.
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "mistral4"), _latent),
    **dict.fromkeys(("deepseek_v2", "minicpm3", "youtu_llm"), _expanded_latent),
    "deepseek_v32": _indexed_latent,
    "longcat_flash": _two_latents,
    "longcat_flash_ngram": _two_latents_and_ids,
    "minimax_m3_vl": _minimax_m3,
    # Windows beside full attention.
    **dict.fromkeys(("afmoe", "exaone_moe", "laguna", "llama", "mellum", "ministral3", "muse_glimmer"), _typed()),
    **dict.fromkeys(("gemma3n", "spark2_5", "step3p5"), _typed()),
    "gpt_oss": _typed(lambda index: "full_attention" if index % 2 else "sliding_attention"),
    "olmo3": _typed(lambda index: "sliding_attention" if (index + 1) % 4 else "full_attention"),
    **dict.fromkeys(("cohere2", "gemma3_text", "plamo3"), _patterned),
    "exaone4": _exaone4,
    "gemma4_text": _gemma4,
    "iquestloopcoder": _looped_windows,
    "llama4": _chunked,
    "mimo_v2_flash": _mimo_v2,
    # Recurrent state, linear attention and convolutions, alone or beside attention.
    "baichuan_m1": _baichuan_m1,
    "bailing_hybrid": _bailing_hybrid,
    "bailing_moe_linear": _bailing_linear,
    "bailing_moe_v3": _bailing_v3,
    "falcon_h1": _falcon_h1,
    "gear": _gear,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi_k3": _kimi_linear,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": _pure_mamba,
    "mamba2": _pure_mamba2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "plamo2": _plamo2,
    "qwen3_5": _qwen_next,
    "qwen3_next": _qwen_next,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv7": _rwkv7,
}  # fmt: skip
