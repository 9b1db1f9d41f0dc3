"""ServeOptions: the options of `radixcache serve`, checked. Never imports MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from policies import make_policy
from runner.routing.routers import make_router


@dataclass(frozen=True)
class ServeOptions:
    """Every option of `radixcache serve`. `runner.commands.serve` makes the fields that have no Option."""

    model: Annotated[str | None, Option(help="demo, tiny, tiny:KIND, a folder in mlx-lm's format, or a hub id.")] = None
    adapter_path: Annotated[str | None, Option(help="Folder of adapter weights for the model.")] = None
    host: Annotated[str, Option(help="Address to listen at; by default only this machine.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen at; 0 takes a free one, and says which.", min=0, max=65535)] = 8080
    allowed_origins: tuple[str, ...] = ("*",)
    draft_model: Annotated[str | None, Option(help="Model for speculative decoding, one request at a time.")] = None
    num_draft_tokens: Annotated[int, Option(help="Tokens that the draft model drafts at a time.", min=1, max=64)] = 3
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code of a tokenizer or a model.")] = (
        False
    )
    log_level: str = "INFO"
    chat_template: Annotated[str, Option(help="A chat template instead of the tokenizer's own.")] = ""
    use_default_chat_template: Annotated[
        bool, Option("--use-default-chat-template", help="Use the default template if the tokenizer has none.")
    ] = False
    temp: Annotated[float, Option(help="Temperature where a request names none.", min=0)] = 0.0
    top_p: Annotated[float, Option(help="Top-p where a request names none.", min=0, max=1)] = 1.0
    top_k: Annotated[int, Option(help="Top-k where a request names none; 0 switches it off.", min=0)] = 0
    min_p: Annotated[float, Option(help="Min-p where a request names none; 0 switches it off.", min=0, max=1)] = 0.0
    max_tokens: Annotated[
        int | None,
        Option(help="Most tokens of a reply, where a request names no number.  [default: to the context's end]", min=1),
    ] = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    decode_concurrency: Annotated[int, Option(help="Most requests that are decoded together.", min=1)] = 32
    prompt_concurrency: Annotated[int, Option(help="Most prompts that are evaluated together.", min=1)] = 8
    prefill_step_size: Annotated[int, Option(help="Tokens of a prompt that are evaluated at a time.", min=1)] = 2048
    kv_bits: Annotated[int | None, Option(help="Bits of quantized KV; one request at a time.", min=2, max=8)] = None
    kv_group_size: Annotated[int, Option(help="Elements per group of quantized keys and values.", min=32, max=128)] = 64
    quantized_kv_start: Annotated[int, Option(help="Position in tokens from which on they are quantized.", min=0)] = 0
    budget_bytes: int | None = None
    policy: Annotated[str, Option(help="What the cache evicts first.")] = "lru"
    live_slots: Annotated[int, Option(help="Conversations whose state stays in place between requests.", min=1)] = 1
    verify: Annotated[float, Option(help="Share of replies to compare with a run without cache.", min=0, max=1)] = 0.0
    exact: Annotated[bool, Option("--exact", help="Reuse only what gives the same bits, one request at a time.")] = (
        False
    )
    disk: Annotated[Path | None, Option(help="Folder that keeps prefixes over restarts, unencrypted.")] = None
    disk_gib: Annotated[float, Option(help="GiB that it may take.", min=0.001)] = 32
    redis: Annotated[
        str | None,
        Option(
            metavar="URL", envvar="RADIXCACHE_REDIS", show_default=False, help="Redis or Valkey for shared prefixes."
        ),
    ] = field(default=None, repr=False)
    context: Annotated[int | None, Option(help="Most tokens of a conversation; longer ones are shifted.", min=1)] = None
    warm: Annotated[Path | None, Option(help="File of system prompts or conversations to pin at start.")] = None
    trace: Annotated[Path | None, Option(help="File for the requests' shapes, for radixcache simulate.")] = None
    replicas: Annotated[int | None, Option(help="Processes, each with a model and a cache, on Ray Serve.", min=1)] = (
        None
    )
    router: Annotated[str | None, Option(help="Choice of replica: prefix (default), hash, round-robin or random.")] = (
        None
    )
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Ray cluster; without it Ray is started here.")] = None
    api_keys: Annotated[Path | None, Option(help="File with a name and a key a line: every request needs one.")] = None
    admin_key_file: Annotated[Path | None, Option(help="File with the name and key for /metrics and /cache.")] = None
    namespace_by: Literal["key", "none"] = "none"
    max_body_mib: Annotated[float, Option(help="Most MiB of a request's body.", min=0.001)] = 32
    max_waiting: Annotated[int, Option(help="Most requests that wait; others are told to come back.", min=0)] = 256
    request_timeout_s: Annotated[float, Option(help="Seconds after which a reply ends with what it has.", min=1)] = 600
    drain_s: Annotated[float, Option(help="Seconds that running replies get when the server is to end.", min=0)] = 10
    show_text: Annotated[bool, Option("--show-text", help="Show decoded text on /cache.")] = False


def require_compatible(options: ServeOptions) -> None:
    """Raise ValueError for options that exclude each other or do not exist."""
    make_policy(options.policy)
    for name in ("kv_bits", "draft_model", "exact", "verify"):
        if options.context is not None and getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--context and {option} contradict each other: requests that run alone are not shifted.")
    if options.kv_bits is not None and options.quantized_kv_start:
        raise ValueError(
            f"--quantized-kv-start {options.quantized_kv_start} cannot be honoured: keys and values that are shared "
            "between prompts are quantized from the first token on. Leave it out."
        )
    for name, value in (("--router", options.router), ("--ray", options.ray)):
        if value is not None and options.replicas is None:
            raise ValueError(f"{name} is for replicas; say how many with --replicas.")
    if options.replicas is not None and options.model is None:
        raise ValueError("--replicas needs --model: where a request goes is found out with its tokenizer.")
    if options.replicas is not None and options.trace is not None:
        raise ValueError("--trace is written by one cache, and --replicas have one each. Leave one of them out.")
    if options.router is not None:
        make_router(options.router)
    for name, file in (("--warm", options.warm), ("--trace", options.trace)):
        if file is not None and options.model is None:
            raise ValueError(f"{name} is for the model that the server starts with; name it with --model.")
