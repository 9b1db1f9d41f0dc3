"""ServeOptions: the options of `radixcache serve`, checked. Never imports MLX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from policies import make_policy
from runner.routing import make_router
from runner.serve.request import DEFAULT, NO_MODEL, ApiError, ModelNames


@dataclass(frozen=True)
class ServeOptions:
    """Every option of `radixcache serve`. `runner.commands.serve` makes the fields that have no Option."""

    model: Annotated[str | None, Option(help="demo, tiny, tiny:KIND, folder, hub id; requests may name others.")] = None
    adapter_path: Annotated[str | None, Option(help="Folder of adapter weights for the model.")] = None
    host: Annotated[str, Option(help="Address to listen at; the default serves only this machine.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen at; 0 takes a free port and prints it.", min=0, max=65535)] = 8080
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_hosts: tuple[str, ...] = ()
    draft_model: Annotated[str | None, Option(help="Smaller model that drafts replies; see --speculate.")] = None
    num_draft_tokens: Annotated[int, Option(help="Tokens that the draft model proposes at a time.", min=1, max=64)] = 3
    speculate: Annotated[
        Literal["tree", "prompt", "none"],
        Option(help="Draft replies from earlier text (tree), from their own prompt, or not."),
    ] = "none"
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code that comes with a model.")] = False
    log_level: str = "INFO"
    chat_template: Annotated[str, Option(help="Chat template to use instead of the tokenizer's own.")] = ""
    use_default_chat_template: Annotated[
        bool, Option("--use-default-chat-template", help="Use the default template if the tokenizer has none.")
    ] = False
    special_tokens_in_text: Annotated[
        bool, Option("--special-tokens-in-text", help="Turn the text of a special token in a message into the token.")
    ] = False
    temp: Annotated[float, Option(help="Temperature, if a request sets none.", min=0)] = 0.0
    top_p: Annotated[float, Option(help="Top-p, if a request sets none.", min=0, max=1)] = 1.0
    top_k: Annotated[int, Option(help="Top-k, if a request sets none; 0 switches it off.", min=0)] = 0
    min_p: Annotated[float, Option(help="Min-p, if a request sets none; 0 switches it off.", min=0, max=1)] = 0.0
    max_tokens: Annotated[
        int | None,
        Option(help="Most tokens of a reply, if a request sets no limit.  [default: to the context's end]", min=1),
    ] = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    move_volatile: Annotated[
        bool,
        Option(
            "--move-volatile/--keep-volatile",
            help="Move the folder and the date in agents' system prompts behind the tools, or leave them in place.",
        ),
    ] = False
    decode_concurrency: Annotated[int, Option(help="Most requests that are decoded together.", min=1)] = 32
    prefill_step_size: Annotated[int, Option(help="Prompt tokens per chunk of prefill.", min=1)] = 2048
    kv_bits: Annotated[int | None, Option(help="Quantize KV to N bits; one request at a time.", min=2, max=8)] = None
    kv_group_size: Annotated[int, Option(help="Elements per group of quantized keys and values.", min=32, max=128)] = 64
    stored_bits: Annotated[int | None, Option(help="Store KV that is not live in 8 or 4 bits.", min=4, max=8)] = None
    quantized_kv_start: Annotated[int, Option(help="First token that is quantized; with --kv-bits only 0.", min=0)] = 0
    budget_bytes: int | None = None
    max_request_bytes: int | None = None
    served_model_names: tuple[str, ...] = ()
    strict_model_names: Annotated[
        bool, Option("--strict-model-names", help="Refuse unknown model names instead of serving --model.")
    ] = False
    only_model: Annotated[
        bool | None,
        Option(
            "--only-model/--any-model",
            help="Load no model but --model; or any path or hub id that a request names.  "
            "[default: any; with --api-keys only --model]",
        ),
    ] = None
    policy: Annotated[str, Option(help="Eviction policy: a name, or my.module:Class.")] = "lru"
    live_slots: Annotated[int, Option(help="Conversations whose state stays in live buffers.", min=1)] = 1
    verify: Annotated[float, Option(help="Share of replies to compare with a run without cache.", min=0, max=1)] = 0.0
    exact: Annotated[bool, Option("--exact", help="Reuse only bit-identical state; one request at a time.")] = False
    disk: Annotated[Path | None, Option(help="Folder that keeps prefixes across restarts, unencrypted.")] = None
    disk_gib: Annotated[float, Option(help="Size limit of the folder, in GiB.", min=0.001)] = 32
    disk_secret_file: Annotated[
        Path | None, Option(help="File of 16 to 64 secret bytes; only files of --disk made with it are read.")
    ] = None
    redis: Annotated[
        str | None,
        Option(
            metavar="URL",
            envvar="RADIXCACHE_REDIS",
            show_default=False,
            help="Redis or Valkey server through which machines share prefixes, unencrypted.",
        ),
    ] = field(default=None, repr=False)
    context: Annotated[int | None, Option(help="Most tokens of a conversation; drops the oldest turns.", min=1)] = None
    warm: Annotated[Path | None, Option(help="File of system prompts or conversations to prefill and pin.")] = None
    trace: Annotated[Path | None, Option(help="Record lengths and block hashes of requests here, for simulate.")] = None
    replicas: Annotated[int | None, Option(help="Processes on Ray Serve, each with a model and a cache.", min=1)] = None
    router: Annotated[str | None, Option(help="Routing: prefix, hash, round-robin or random.  [default: prefix]")] = (
        None
    )
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Ray cluster; without it, Ray starts here.")] = None
    api_keys: Annotated[Path | None, Option(help="File with a name and a key per line; requests need a key.")] = None
    admin_key_file: Annotated[
        Path | None,
        Option(help="File with a name and the key for /metrics and /cache; without it, both answer only this machine."),
    ] = None
    namespace_by: Literal["key", "none"] = "none"
    max_body_mib: Annotated[float, Option(help="Largest request body, in MiB.", min=0.001)] = 32
    max_waiting: Annotated[int, Option(help="Most requests that wait; further requests get HTTP 429.", min=0)] = 256
    request_timeout_s: Annotated[float, Option(help="Seconds after which a reply is cut off.", min=1)] = 600
    drain_s: Annotated[float, Option(help="Seconds that running replies may take at shutdown.", min=0)] = 10
    show_text: Annotated[bool, Option("--show-text", help="Show decoded text on /cache.")] = False

    @property
    def drafts(self) -> Literal["tree", "prompt"] | None:
        return None if self.speculate == "none" else self.speculate

    @property
    def is_only_model(self) -> bool:
        return None not in (self.api_keys, self.model) if self.only_model is None else self.only_model

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What a request may call the served model. Empty: the server has no model."""
        if self.model is None:
            return ()
        path = Path(self.model).expanduser()
        own = str(path.resolve()) if path.exists() else self.model
        return tuple(dict.fromkeys((*self.served_model_names, own, self.model, path.name)))

    @property
    def listed_names(self) -> tuple[str, ...]:
        return self.served_model_names or self.names[:1]

    def means_served(self, name: str) -> bool:
        """Whether a name in a request means the served model. ApiError: no other name is allowed."""
        if name in (DEFAULT, *self.names) or (self.model is not None and one_spelling(name, self.model) == self.model):
            return True
        # With keys, no answer depends on which files there are.
        is_unknown = not is_specification(name, looks_for_files=self.api_keys is None)
        is_refused = self.strict_model_names if is_unknown else self.is_only_model
        if self.model is not None and is_refused:
            wanted = f"wanted {' or '.join(self.listed_names)}"
            raise ApiError(404, f"model {name!r:.200} is not served here; {wanted}.", param="model", code=NO_MODEL)
        return is_unknown and self.model is not None

    def key_of(self, names: ModelNames) -> ModelNames:
        """Replace defaults, as in mlx_lm.server, and names that mean the served model.

        ApiError: the server was started without a model, or serves no other one.
        """
        draft = self.draft_model if names.draft == DEFAULT else names.draft
        draft = None if draft is None else one_spelling(draft, self.draft_model)
        adapter, own = names.adapter, self.adapter_path
        if adapter is not None:
            adapter = own if own is not None and real_path(adapter) == real_path(own) else real_path(adapter)
        is_own = self.means_served(names.model)
        model = names.model if names.model in self.names else one_spelling(names.model, self.model)
        others = (("draft_model", draft, self.draft_model), ("adapters", adapter, self.adapter_path))
        for param, asked, own in others if self.is_only_model else ():
            if asked not in (None, own):
                raise ApiError(404, f"{asked!r:.200} is not served here.", param=param, code=NO_MODEL)
        # With its exact name, the served model gets the adapter of the request, as in mlx_lm.server.
        if not is_own or (model == self.model and not self.is_only_model):
            return ModelNames(model, adapter, draft)
        if self.model is None:
            raise ApiError(
                404,
                "the server was started without --model: name a hub id or a folder as the request's model.",
                param="model",
            )
        return ModelNames(self.model, self.adapter_path, draft)


def is_specification(name: str, *, looks_for_files: bool = True) -> bool:
    """Whether a name has the form of a model that can be loaded: a path, a hub id, demo, tiny or tiny:KIND.

    `looks_for_files`: so has the name of a folder of a model here.
    """
    if "/" in name or name in ("demo", "tiny") or name.startswith(("tiny:", "~", ".")):
        return True
    return looks_for_files and bool(name) and os.path.isfile(os.path.join(name, "config.json"))


def one_spelling(name: str, own: str | None) -> str:
    """The same name for all spellings of a model: `own` if that is one of them."""
    found = real_spelling(name)
    return own if own is not None and found == real_spelling(own) else found


def real_spelling(name: str) -> str:
    """A folder's real path, tiny:llama for tiny, any other name as it is."""
    if name == "tiny" or name.startswith("tiny:"):
        return f"tiny:{name.partition(':')[2] or 'llama'}"
    return name if name == "demo" else real_path(name)


def real_path(name: str) -> str:
    """The real path of what exists; any other name as it is."""
    path = os.path.expanduser(name)
    return os.path.realpath(path) if name and os.path.exists(path) else name


def require_compatible(options: ServeOptions) -> None:
    """Raise ValueError for options that exclude each other or do not exist."""
    make_policy(options.policy)
    for name in ("kv_bits", "exact"):
        if options.context is not None and getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--context does not work with {option}, which runs requests alone. Leave one out.")
    if options.stored_bits is not None and options.exact:
        raise ValueError("--stored-bits rounds stored state, so --exact is impossible. Leave one out.")
    if options.exact and options.speculate != "none":
        raise ValueError(
            f"--speculate {options.speculate} does not work with --exact, as passes over several tokens "
            "round differently. Leave one out."
        )
    if options.kv_bits is not None and options.quantized_kv_start:
        raise ValueError(
            f"--quantized-kv-start is {options.quantized_kv_start}; wanted 0: keys and values that prompts share are "
            "quantized from the first token on."
        )
    for name, value in (("--router", options.router), ("--ray", options.ray)):
        if value is not None and options.replicas is None:
            raise ValueError(f"{name} needs --replicas.")
    if options.replicas is not None and options.model is None:
        raise ValueError("--replicas needs --model: the router uses the model's tokenizer.")
    if options.replicas is not None and options.trace is not None:
        raise ValueError("--trace records one cache, and each replica has its own. Leave --trace or --replicas out.")
    if options.router is not None:
        make_router(options.router)
    if options.disk_secret_file is not None and options.disk is None:
        raise ValueError("--disk-secret-file needs --disk.")
    for name, file in (("--warm", options.warm), ("--trace", options.trace)):
        if file is not None and options.model is None:
            raise ValueError(f"{name} is for the model that the server starts with; give --model.")
