"""Model types with recurrent, linear-attention or convolutional layers, alone or beside attention. No MLX.

Each function takes a configuration and yields its layers. Source: mlx_lm.models, mlx-lm 0.32.2.
"""

from collections.abc import Iterator

from runner.layer_kinds import Layer, Span, State, Window, attention, latent_span, pair
from runner.model_fields import Config


def mamba1(config: Config) -> State:
    inner = config.get("intermediate_size", "d_inner")
    state = config.get("state_size", "d_state")
    return State(elements=inner * (config.get("conv_kernel", "d_conv") - 1 + state))


def mamba2(inner: int, heads: int, head_dim: int, state: int, groups: int, kernel: int) -> State:
    """A convolution over inputs and both projections of the state, in the model's dtype; the state in float32."""
    return State(
        elements=(kernel - 1) * (inner + 2 * groups * state),
        float32_elements=heads * head_dim * state,
    )


def pure_mamba(config: Config) -> Iterator[Layer]:
    for _ in range(config.get("num_hidden_layers", "n_layer", "n_layers")):
        yield mamba1(config)


def pure_mamba2(config: Config) -> Iterator[Layer]:
    heads, dim = config.get("num_heads"), config.get("head_dim")
    state = config.get("ssm_state_size", "state_size")
    for _ in range(config.layers):
        yield mamba2(heads * dim, heads, dim, state, config.get("n_groups"), config.get("conv_kernel"))


def jamba(config: Config) -> Iterator[Layer]:
    kinds = config.layer_types("layers_block_type") or [
        "attention" if index % config.get("attn_layer_period") == config.get("attn_layer_offset") else "mamba"
        for index in range(config.layers)
    ]
    inner = config.get("mamba_expand") * config.hidden
    state = State(elements=inner * (config.get("mamba_d_conv") - 1 + config.get("mamba_d_state")))
    for kind in kinds:
        yield Span(pair(config.kv_heads, config.hidden // config.query_heads)) if kind == "attention" else state


def plamo2(config: Config) -> Iterator[Layer]:
    step = config.get("mamba_step")
    dim, heads = config.get("hidden_size_per_head"), config.get("mamba_num_heads")
    kernel, state = config.get("mamba_d_conv"), config.get("mamba_d_state")
    mamba = State(elements=(kernel - 1) * heads * dim, float32_elements=heads * dim * state)
    span = Span(pair(config.kv_heads, dim))
    for index in range(config.layers):
        is_mamba = index != config.layers - 1 if config.layers <= step // 2 else index % step != step // 2
        yield mamba if is_mamba and config.value("mamba_enabled", True) else span


def falcon_h1(config: Config) -> Iterator[Layer]:
    """A Mamba2 mixer and full attention side by side in every layer."""
    heads, dim = config.get("mamba_n_heads"), config.get("mamba_d_head")
    for _ in range(config.layers):
        yield mamba2(
            config.get("mamba_d_ssm"),
            heads,
            dim,
            config.get("mamba_d_state"),
            config.get("mamba_n_groups"),
            config.get("mamba_d_conv"),
        )
        yield Span(attention(config))


def granite_hybrid(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        if kind == "attention":
            yield Span(pair(config.kv_heads, config.hidden // config.query_heads))
        else:
            heads, dim = config.get("mamba_n_heads"), config.get("mamba_d_head")
            groups, kernel = config.get("mamba_n_groups"), config.get("mamba_d_conv")
            yield mamba2(heads * dim, heads, dim, config.get("mamba_d_state"), groups, kernel)


def nemotron_h(config: Config) -> Iterator[Layer]:
    names = {"mamba": "M", "attention": "*"}
    kinds = config.layer_types("hybrid_override_pattern")
    if kinds is None:
        listed = config.layer_types("layers_block_type") or config.layer_types() or []
        kinds = [names.get(kind, "-") for kind in listed]
    heads, dim = config.value("mamba_num_heads"), config.value("mamba_head_dim")
    for kind in kinds:
        if kind == "*":
            yield Span(attention(config))
        elif kind == "M":
            state, groups = config.get("ssm_state_size"), config.get("n_groups")
            yield mamba2(heads * dim, heads, dim, state, groups, config.get("conv_kernel"))


def gated_delta(config: Config) -> State:
    """Gated delta net: a convolution over queries, keys and values, a matrix per value head in float32."""
    key_heads, value_heads = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    key_dim, value_dim = config.get("linear_key_head_dim"), config.get("linear_value_head_dim")
    width = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = config.get("linear_conv_kernel_dim")
    return State(elements=(kernel - 1) * width, float32_elements=value_heads * key_dim * value_dim)


def qwen_next(config: Config) -> Iterator[Layer]:
    every = config.get("full_attention_interval")
    for index in range(config.layers):
        yield Span(attention(config)) if (index + 1) % every == 0 else gated_delta(config)


def olmo_hybrid(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        yield gated_delta(config) if kind == "linear_attention" else Span(attention(config))


def kimi_delta(heads: int, dim: int, kernel: int) -> State:
    """Kimi delta attention: a convolution for each of queries, keys and values, a matrix per head in float32."""
    return State(elements=3 * (kernel - 1) * heads * dim, float32_elements=heads * dim * dim)


def kimi_linear(config: Config) -> Iterator[Layer]:
    linear = config.part("linear_attn_config")
    delta_layers = set(linear.value("kda_layers", ()))
    delta = kimi_delta(linear.get("num_heads"), linear.get("head_dim"), linear.get("short_conv_kernel_size"))
    for number in range(1, config.layers + 1):
        yield delta if number in delta_layers else latent_span(config)


def is_global(config: Config, index: int) -> bool:
    """Ling's linear models: the last layer of each `layer_group_size` attends fully, and a short last group does."""
    group = config.get("layer_group_size")
    return (index + 1) % group == 0 or index >= config.layers // group * group


def bailing_linear(config: Config) -> Iterator[Layer]:
    # The linear layers take their width from the hidden size, the full ones their own head_dim.
    heads, dim = config.query_heads, config.hidden // config.query_heads
    for index in range(config.layers):
        yield Span(attention(config)) if is_global(config, index) else State(elements=heads * dim * dim)


def bailing_hybrid(config: Config) -> Iterator[Layer]:
    heads, dim = config.query_heads, config.head_dim
    for index in range(config.layers):
        yield latent_span(config) if is_global(config, index) else State(float32_elements=heads * dim * dim)


def bailing_v3(config: Config) -> Iterator[Layer]:
    delta = kimi_delta(config.query_heads, config.head_dim, config.get("short_conv_kernel_size"))
    for index in range(config.layers):
        yield latent_span(config) if is_global(config, index) else delta


def rwkv7(config: Config) -> Iterator[Layer]:
    """Two shifted tokens and a matrix per head."""
    dim = config.get("head_dim")
    for _ in range(config.layers):
        yield State(elements=2 * config.hidden + config.hidden // dim * dim * dim)


def recurrent_gemma(config: Config) -> Iterator[Layer]:
    """RG-LRU layers keep a convolution and a vector; attention is multi-query, within a window."""
    kinds = config.layer_types("block_types") or config.layer_types("_block_types") or []
    width = config.get("lru_width", default=config.hidden)
    for index in range(config.layers):
        if kinds and kinds[index % len(kinds)] == "attention":
            dim = config.hidden // config.query_heads
            yield Window(pair(1, dim), config.get("attention_window_size"))
        else:
            # mlx-lm convolves over 4 tokens whatever conv1d_width says: three of them are kept, and the state.
            yield State(elements=4 * width)


def lfm2(config: Config) -> Iterator[Layer]:
    full = config.value("full_attn_idxs")
    kinds = config.layer_types() or []
    for index in range(config.layers):
        is_full = index in full if full is not None else kinds[index] == "full_attention"
        if is_full:
            yield Span(pair(config.kv_heads, config.hidden // config.query_heads))
        else:
            yield State(elements=(config.get("conv_L_cache") - 1) * config.hidden)


def gear(config: Config) -> Iterator[Layer]:
    for kind in config.layer_types() or []:
        if kind == "full_attention":
            yield Span(attention(config))
        elif kind == "sliding_attention":
            yield Window(attention(config), config.get("sliding_window"))
        else:
            # A convolution of keys and one of values.
            width = config.kv_heads * config.head_dim
            yield State(elements=2 * (config.get("conv_L_cache") - 1) * width)


def baichuan_m1(config: Config) -> Iterator[Layer]:
    """Full and windowed attention, each with the last keys and values before their convolution."""
    windows = set(config.value("sliding_window_layers", ()))
    for index in range(config.layers):
        is_window = index in windows
        names = ("num_swa_attention_heads", "num_swa_key_value_heads") if is_window else ()
        queries = config.get(*names[:1], "num_attention_heads")
        heads = config.get(*names[1:], "num_key_value_heads")
        dims = pair(heads, config.hidden // queries)
        yield State(elements=sum(count * dim for count, dim in dims))
        yield Window(dims, config.get("sliding_window")) if is_window else Span(dims)
