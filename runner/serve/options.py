"""ServeOptions: what the server was asked for on its command line, checked. Never imports MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ServeOptions:
    """Every option of `radixcache serve`; those of mlx_lm.server under its names.

    Attributes:
        model: as for `runner.models.load`, so `demo` and `tiny:KIND` work; None: only models named by requests.
        budget_bytes: of all models' caches together; None: PrefixCache's own default.
        context: tokens of a conversation at a time at most, beyond which it is shifted.
        warm, trace, api_keys, admin_key_file: files.
    """

    model: str | None = None
    adapter_path: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    allowed_origins: tuple[str, ...] = ("*",)
    draft_model: str | None = None
    num_draft_tokens: int = 3
    trust_remote_code: bool = False
    log_level: str = "INFO"
    chat_template: str = ""
    use_default_chat_template: bool = False
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    budget_bytes: int | None = None
    policy: str = "lru"
    live_slots: int = 1
    verify: float = 0.0
    exact: bool = False
    context: int | None = None
    warm: Path | None = None
    trace: Path | None = None
    api_keys: Path | None = None
    admin_key_file: Path | None = None
    namespace_by: Literal["key", "none"] = "none"
    max_body_mib: float = 32
    max_waiting: int = 256
    request_timeout_s: float = 600
    drain_s: float = 10
    show_text: bool = False
