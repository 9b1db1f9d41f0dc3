"""Which state the layers of each model type keep per token and per checkpoint, as mlx-lm lays it out. No MLX.

A type is a line in `TYPES`: a function from the configuration to its layers.
"""

from collections.abc import Callable, Iterator

from runner import attention_layers as attending
from runner import recurrent_layers as recurrent
from runner.layer_kinds import Layer
from runner.model_fields import INSTEAD, Config, ModelConfigError

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
        attending.full,
    ),
    "mistral3": attending.mistral3,
    **dict.fromkeys(
        ("cohere", "helium", "hunyuan", "internlm2", "lille-130m", "minicpm", "nanochat"), attending.by_hidden
    ),
    **dict.fromkeys(("gpt2", "gpt_neox", "gptj", "phixtral", "qwen", "talkie"), attending.all_heads),
    "gpt_bigcode": attending.one_head,
    "afm7": attending.reused_tail,
    "dbrx": attending.dbrx,
    "nanbeige": attending.looped,
    "nemotron-nas": attending.nemotron_nas,
    "openelm": attending.openelm,
    "plamo": attending.plamo,
    # Latent attention.
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "mistral4"), attending.latent),
    **dict.fromkeys(("deepseek_v2", "minicpm3", "youtu_llm"), attending.expanded_latent),
    "deepseek_v32": attending.indexed_latent,
    "longcat_flash": attending.two_latents,
    "longcat_flash_ngram": attending.two_latents_and_ids,
    "minimax_m3_vl": attending.minimax_m3,
    # Windows beside full attention.
    **dict.fromkeys(("afmoe", "exaone_moe", "gemma3n", "laguna", "llama", "mellum"), attending.typed()),
    **dict.fromkeys(("ministral3", "muse_glimmer", "spark2_5", "step3p5"), attending.typed()),
    "gpt_oss": attending.typed(lambda index: "full_attention" if index % 2 else "sliding_attention"),
    "olmo3": attending.typed(lambda index: "sliding_attention" if (index + 1) % 4 else "full_attention"),
    **dict.fromkeys(("cohere2", "gemma3_text", "plamo3"), attending.patterned),
    "exaone4": attending.exaone4,
    "gemma4_text": attending.gemma4,
    "iquestloopcoder": attending.looped_windows,
    "llama4": attending.chunked,
    "mimo_v2_flash": attending.mimo_v2,
    # Recurrent state, linear attention and convolutions, alone or beside attention.
    "baichuan_m1": recurrent.baichuan_m1,
    "bailing_hybrid": recurrent.bailing_hybrid,
    "bailing_moe_linear": recurrent.bailing_linear,
    "bailing_moe_v3": recurrent.bailing_v3,
    "falcon_h1": recurrent.falcon_h1,
    "gear": recurrent.gear,
    "granitemoehybrid": recurrent.granite_hybrid,
    "jamba": recurrent.jamba,
    "kimi_k3": recurrent.kimi_linear,
    "kimi_linear": recurrent.kimi_linear,
    "lfm2": recurrent.lfm2,
    "lfm2_moe": recurrent.lfm2,
    "mamba": recurrent.pure_mamba,
    "mamba2": recurrent.pure_mamba2,
    "nemotron_h": recurrent.nemotron_h,
    "olmo_hybrid": recurrent.olmo_hybrid,
    "plamo2": recurrent.plamo2,
    "qwen3_5": recurrent.qwen_next,
    "qwen3_next": recurrent.qwen_next,
    "recurrent_gemma": recurrent.recurrent_gemma,
    "rwkv7": recurrent.rwkv7,
}  # fmt: skip


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
