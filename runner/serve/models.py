"""Models: which weights are loaded, and the cache of each model. The generation thread uses it.

    names of a request ──▶ key ──▶ weights       one model at a time, as in mlx_lm.server
                           └──▶ PrefixCache   one for each model, with one budget for all; kept when a model is unloaded

A model that is loaded again has its prefixes, except if they were evicted or its files have changed. MOST_OTHER_CACHES
limits how many models keep a cache. All spellings of a model's name give one key.

A warm file (`read_warm_file`) names system prompts and conversations to prefill and pin at start:

    "You are a helpful assistant."                                             a system prompt
    {"name": "support", "system": "You answer customers ...", "tools": [...]}
    {"name": "onboarding", "messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]}

A .jsonl file has one entry per line; any other file is JSON, with one entry or a list. `name` is the name of the pin
(default "warm-1" and so on). Only requests of `namespace` find it; with --namespace-by key, that is a key's name.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from radixcache import DiskStore, Ledger, PrefixCache, RadixCacheError, RedisStore, UnsupportedCacheError
from radixcache.chat import RenderedChat
from radixcache.chat_template import ChatTemplate
from radixcache.groups.passes import way_of
from radixcache.layers.stored import weights_identity
from radixcache.layers.trials import BothModels
from radixcache.observe.trace import TraceWriter
from radixcache.prefix_cache import analytic_cost, default_budget_bytes
from radixcache.stores.block_store import StoreStats
from radixcache.tree.history import OnEvent
from runner.files import read_json
from runner.models.load import LoadedModel, ModelError, ModelOutline, load_model, load_outline, model_folder
from runner.script.conversation import checked_tools
from runner.script.conversation_formats import checked_messages
from runner.serve import mlx_lm_border
from runner.serve.options import ServeOptions
from runner.serve.prompts import UNBOUNDED_TOKENS, RenderedPrompt, prompt_of, require_short
from runner.serve.request import NO_MODEL, NOT_KEPT, ApiError, ModelNames, Request
from runner.serve.served_model import ServedModel, fresh_caches
from runner.serve.service import FairThreads
from runner.serve.volatile import behind_tools
from runner.text import cut

logger = logging.getLogger(__name__)

COUNTED_CONTEXTS = 4  # times the context: tokens of longer prompts are not counted
#: Caches that are kept besides that of the default model: those that were used last.
MOST_OTHER_CACHES = 8
WANTED = "system prompts or conversations: text, or objects with system or messages"

Fingerprint = tuple[tuple[str, int, int], ...]  # path, bytes and time of the last change of each file of a model


class WarmFileError(ValueError):
    pass


@dataclass(frozen=True)
class WarmEntry:
    """One prefix to store and pin. `where` is its place in the file, for errors."""

    name: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    namespace: str
    where: str

    def tokens(self, tokenizer: Any, options: ServeOptions) -> NDArray[Any]:
        """The tokens that all conversations with this beginning share. WarmFileError: there are none."""
        is_open = self.messages[-1]["role"] in ("system", "developer")  # templates need a message after these
        own = behind_tools([*self.messages])[0] if options.move_volatile else self.messages
        messages = [*own, *([{"role": "user", "content": "Hello"}] if is_open else [])]
        is_plain_text = not options.special_tokens_in_text
        try:
            template = ChatTemplate(tokenizer, self.tools, {**options.chat_template_args}, is_plain_text=is_plain_text)
            chat = RenderedChat(template, messages, "message" if messages[-1]["role"] == "assistant" else "reply")
            end = max(0, *chat.head_ends, *(chat.end(count) for count in range(1, len(own) + 1)))
        except (ValueError, RecursionError) as error:
            raise WarmFileError(f"{self.where}: {error}") from error
        if end == 0:
            raise WarmFileError(f"{self.where}: no other prompt can begin with what the chat template makes of it.")
        return chat.tokens[:end]


def read_warm_file(path: Path) -> list[WarmEntry]:
    """Read a warm file. WarmFileError: it cannot be read, or has another form than the header of this module says."""
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            values = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise WarmFileError(f"{path}: cannot be read ({error}); wanted a line for each of {WANTED}.") from error
    else:
        found = read_json(path, WANTED, WarmFileError)
        values = found if isinstance(found, list) else [found]
    return [_entry(value, number, f"{path}: entry {number}") for number, value in enumerate(values, start=1)]


def _entry(value: Any, number: int, where: str) -> WarmEntry:
    if isinstance(value, str):
        value = {"system": value}
    if not isinstance(value, dict) or ("system" in value) == ("messages" in value):
        raise WarmFileError(f"{where} is {value!r:.80}; wanted {WANTED}.")
    name, namespace = value.get("name", f"warm-{number}"), value.get("namespace", "")
    if not isinstance(name, str) or not name or not isinstance(namespace, str):
        raise WarmFileError(f"{where}: name {name!r:.80}, namespace {namespace!r:.80}; wanted text.")
    system = [{"role": "system", "content": value.get("system")}]
    messages = checked_messages(value.get("messages", system), where)
    if not messages:
        raise WarmFileError(f"{where} has no messages; wanted at least one.")
    return WarmEntry(name, messages, checked_tools(value.get("tools"), where), namespace, where)


class _CachedModel(NamedTuple):
    cache: PrefixCache
    fingerprint: Fingerprint
    is_parallel: bool


class Models:
    """The loaded model, and the caches of all models. StoreError, ValueError: --disk or --redis cannot be used.

    `current` is None before the first load and after a failed one. `ledger` is None until a model gives the budget.
    """

    def __init__(self, options: ServeOptions, on_event: OnEvent | None = None) -> None:
        self.current: ServedModel | None = None
        self.ledger = None if options.budget_bytes is None else Ledger(options.budget_bytes)
        self._options, self._on_event = options, on_event
        self._cached: dict[ModelNames, _CachedModel] = {}
        # A client has two threads: while one loads a tokenizer, the other goes on. The third is for other clients.
        self._renderer = FairThreads(3, 2, "prompts")
        self._trace = None if options.trace is None else TraceWriter(options.trace)
        self._stores: list[DiskStore | RedisStore] = []
        if options.disk is not None:
            disk_bytes = int(options.disk_gib * (1 << 30))
            secret = None if options.disk_secret_file is None else options.disk_secret_file.read_bytes()
            self._stores.append(DiskStore(options.disk, budget_bytes=disk_bytes, write_on="close", secret=secret))
        if options.redis is not None:
            self._stores.append(RedisStore(options.redis, write_on="close"))

    def caches(self) -> list[tuple[ModelNames, PrefixCache]]:
        """The caches of all models loaded so far, the current one last. Any thread may call this."""
        return [(key, cached.cache) for key, cached in [*self._cached.items()]]

    def store_stats(self) -> dict[str, StoreStats]:
        return {name: store.stats for store in self._stores for name in store.tiers}

    def open(self, key: ModelNames) -> ServedModel:
        """Load a model in place of the current one, which is idle. ModelError: it cannot be found or loaded."""
        if self.current is not None and self.current.key == key:
            return self.current
        fingerprint = _fingerprint(key)
        self._unload()
        try:
            loaded, draft = self._load(key)
            cached = self._cached.pop(key, None)
            if cached is not None and cached.fingerprint != fingerprint:
                cached.cache.close()
                cached = None
            is_new = cached is None
            cached = self._cached[key] = cached or self._new_cache(key, loaded, draft, fingerprint)
            self.current = ServedModel(
                key, loaded, draft, cached.cache, self._options, is_parallel=cached.is_parallel, renderer=self._renderer
            )
            if is_new and self._options.kv_bits is not None:
                self._require_quantizable(self.current)
            if is_new and self._is_default(key):
                logger.info("warming up: a reply to nobody, so that the first client does not wait")
                self.current.rehearse()
                for entry in [] if self._options.warm is None else read_warm_file(self._options.warm):
                    self.current.warm(entry.tokens(loaded.tokenizer, self._options), entry.namespace, name=entry.name)
        except BaseException:
            self._unload()
            raise
        others = [each for each in self._cached if not self._is_default(each)]
        for each in others[:-MOST_OTHER_CACHES]:
            self._cached.pop(each).cache.close()
        return self.current

    def _require_quantizable(self, model: ServedModel) -> None:
        """Try a new cache with quantized keys and values. ModelError: the model cannot do it."""
        try:
            model.cache.learn(model.model, model.draft_model)
        except ValueError as error:
            self._cached.pop(model.key).cache.close()
            given = f"--kv-bits {self._options.kv_bits} --kv-group-size {self._options.kv_group_size}"
            raise ModelError(f"model {model.key.model}: {given} does not work with it: {error}") from error

    def refusal(self, names: ModelNames, error: Exception) -> ApiError:
        """The error for a client whose model cannot be loaded. If keys are set, it tells nothing about files here."""
        if self._options.api_keys is not None:
            logger.warning("model %s cannot be loaded: %s", cut(names.model), cut(str(error)))
            return ApiError(404, "the model cannot be loaded here.", param="model", code=NO_MODEL)
        if isinstance(error, (RadixCacheError, ValueError)):
            return ApiError(404, str(error), param="model", code=NO_MODEL)
        return ApiError(500, str(error))

    def loaded(self, names: ModelNames) -> ServedModel:
        """The loaded model. ApiError: another model is loaded, or none."""
        if self.current is None or self.current.key != self._options.key_of(names):
            raise ApiError(409, f"model {names.model!r} is not in memory; ask it something first.", param="model")
        return self.current

    def rendering(self, asked: Request) -> Future[RenderedPrompt]:
        """Make a prompt on another thread, also for a model that is not loaded. ApiError: as for a reply.

        The prompt may have COUNTED_CONTEXTS times the tokens of the context: the client may only want their count.
        """
        key, current = self._options.key_of(asked.names), self.current
        if current is None or current.key.model != key.model:
            return self._renderer.submit(asked.client, self._prompt_of_outline, asked, key.model)
        rendering = current.rendering(asked, contexts=COUNTED_CONTEXTS)
        if rendering is None:
            rendering = Future()
            rendering.set_result(current.prompt(asked))
        return rendering

    def warming(self, asked: Request) -> Future[NDArray[Any]]:
        """Make tokens for `ServedModel.warm` on another thread: those that all continuations of a prompt share.

        ApiError: as for `loaded`, or there are images. WarmFileError: there are no such tokens.
        """
        loaded = self.loaded(asked.names)
        if any(mlx_lm_border.image_parts(asked.messages)):
            raise ApiError(400, "a prompt with images cannot be warmed.", param="messages")

        def tokens() -> NDArray[Any]:
            if asked.prompt is not None:
                return np.asarray(loaded.prompt(asked).tokens)
            require_short(asked, loaded.tokenizer, loaded.most_tokens)
            entry = WarmEntry("", asked.messages, asked.tools, asked.namespace, "messages")
            return entry.tokens(loaded.tokenizer, self._options)

        return self._renderer.submit(asked.client, tokens)

    def _prompt_of_outline(self, asked: Request, name: str) -> RenderedPrompt:
        try:
            outline = outline_of(name, self._options)
        except ModelError as error:
            raise self.refusal(ModelNames(name), error) from error
        args, special_tokens = self._options.chat_template_args, self._options.special_tokens_in_text
        most_tokens = COUNTED_CONTEXTS * (outline.context_length or UNBOUNDED_TOKENS)
        return prompt_of(asked, outline.tokenizer, args, special_tokens=special_tokens, most_tokens=most_tokens)

    def close(self) -> None:
        self._renderer.close()
        self._unload()
        for cached in self._cached.values():
            cached.cache.close()
        self._cached.clear()
        for store in self._stores:
            store.close()
        if self._trace is not None:
            self._trace.close()

    def _is_default(self, key: ModelNames) -> bool:
        return self._options.model is not None and key == self._options.key_of(ModelNames())

    def _unload(self) -> None:
        if self.current is not None:
            self.current.close()
        self.current = None
        gc.collect()
        mx.clear_cache()

    def _load(self, key: ModelNames) -> tuple[LoadedModel, Any]:
        loaded = load_model(
            key.model,
            show_progress=False,
            adapter_path=key.adapter,
            tokenizer_config=_tokenizer_config(self._options),
            trust_remote_code=self._options.trust_remote_code,
        )
        _choose_template(loaded.tokenizer, self._options)
        return loaded, None if key.draft is None else load_model(key.draft, show_progress=False).model

    def _new_cache(self, key: ModelNames, loaded: LoadedModel, draft: Any, fingerprint: Fingerprint) -> _CachedModel:
        options = self._options
        models = [loaded.model] if draft is None else [loaded.model, draft]
        empty = fresh_caches(models)
        fresh = partial(copy.deepcopy, empty)
        run = loaded.model if draft is None else BothModels(loaded.model, draft, len(empty))
        is_parallel = options.kv_bits is None and not options.exact and _can_share(run, fresh)
        if options.context is not None and not is_parallel:
            raise ModelError(f"model {key.model}: --context needs shared layers; its layers cannot be shared.")
        if self.ledger is None:
            self.ledger = Ledger(default_budget_bytes(loaded.model)[0])
        cache = PrefixCache(
            caches=fresh,
            budget_bytes=self.ledger,
            max_request_bytes=options.max_request_bytes,
            policy=options.policy,
            cost=analytic_cost(loaded.model),
            live_slots=options.live_slots,
            kv_bits=options.kv_bits,
            kv_group_size=options.kv_group_size,
            stored_bits=options.stored_bits,
            trace=self._trace if self._is_default(key) else None,
            tokenizer=loaded.tokenizer if options.show_text else None,
            verify=options.verify,
            exact=options.exact,
            step_size=options.prefill_step_size,
            on_event=self._on_event,
            store=self._stores or None,
            store_if=lambda namespace: not namespace.endswith(NOT_KEPT),
            identity=None if not self._stores else weights_identity(*models, name=key.model),
        )
        return _CachedModel(cache, fingerprint, is_parallel)


def outline_of(name: str, options: ServeOptions) -> ModelOutline:
    """A model without its weights, with the template that the options choose. ModelError: there is no such model."""
    outline = load_outline(name, show_progress=False, tokenizer_config=_tokenizer_config(options))
    _choose_template(outline.tokenizer, options)
    return outline


def _tokenizer_config(options: ServeOptions) -> dict[str, Any]:
    template = {"chat_template": options.chat_template} if options.chat_template else {}
    return {"trust_remote_code": options.trust_remote_code, **template}


def _choose_template(tokenizer: Any, options: ServeOptions) -> None:
    if options.use_default_chat_template and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template


def _can_share(model: Any, fresh: Callable[[], list[Any]]) -> bool:
    """Try whether the model decodes several rows. The result is remembered, so no request waits for this trial."""
    try:
        with PrefixCache(caches=fresh, budget_bytes=1) as cache:
            cache.begin_many(capacity=1).close()
        way_of(model, fresh)
    except UnsupportedCacheError:
        return False
    return True


def _fingerprint(key: ModelNames) -> Fingerprint:
    """Fingerprint of a model, its adapter and its draft model. ModelError: one of them is missing."""
    folders = [model_folder(name, show_progress=False) for name in (key.model, key.draft) if name is not None]
    if key.adapter is not None:
        folders.append(Path(os.path.expanduser(key.adapter)))
    found: list[tuple[str, int, int]] = []
    for folder in filter(None, folders):
        try:
            files = [(str(path), path.stat()) for path in sorted(folder.iterdir())]
        except OSError as error:
            raise ModelError(f"{folder!s:.200}: {error.strerror}; wanted a folder.") from error
        found += [(path, about.st_size, about.st_mtime_ns) for path, about in files]
    return tuple(found)
