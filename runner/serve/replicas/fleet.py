"""Fleet: the replicas, which the application uses like the Scheduler in one process. Never loads a model.

    Service.ask(opened) ── Fleet.ask ── Relay ──▶ Replica.answer of the replica that the switchboard chooses
    one thread each  ◀── Replica.news, which the switchboard learns

RoutedPrompts makes the digests of a prompt before a replica is chosen, with a tokenizer and no weights. The replica
makes the prompt again, by the same code, and refuses a wrong one. So nothing here refuses a request: without digests it
goes to the replica with the least work. `Fleet.ask` runs on the event loop, the rest in any thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI

from radixcache.prefix_cache import default_budget_bytes
from runner.routing import Ask, chain_digests, root_digest
from runner.serve.app import assemble_app
from runner.serve.metrics import in_a_line
from runner.serve.models import COUNTED_CONTEXTS, Models, outline_of, read_warm_file
from runner.serve.options import ServeOptions
from runner.serve.prompts import UNBOUNDED_TOKENS, prompt_of
from runner.serve.replicas import ray_border
from runner.serve.replicas.pages import Scrape, replica_routes
from runner.serve.replicas.ray_border import Relay
from runner.serve.replicas.replica import Replica
from runner.serve.replicas.switchboard import SWITCHBOARDS, AdminReply, AdminRequest, Switchboard
from runner.serve.request import ApiError, ModelNames, OpenRequest, Request
from runner.serve.responses import ResponseMemory
from runner.serve.service import FairThreads

ADMIN_S, END_S = 60, 30  # seconds that a replica may take to answer an admin, and to end when its replies have ended
PAUSE_S = 1  # seconds before a replica that sends no more news is asked again, if it is still there
OTHER_CALLS = 32  # calls of one replica besides requests: news, admins, its end

logger = logging.getLogger(__name__)


class Fleet:
    """Answers requests by replicas. ModelError, ValueError: an option is wrong."""

    def __init__(self, options: ServeOptions) -> None:
        assert options.replicas is not None
        self._options = options
        self._name = f"radixcache-{secrets.token_hex(4)}"
        self._secret = secrets.token_bytes(16)
        self._prompts = RoutedPrompts(options, self._secret)
        self.count_tokens = self._prompts.count_tokens
        self.switchboard = Switchboard(options.router or "prefix", self._listen)
        SWITCHBOARDS[self._name] = self.switchboard
        self._handle: Any = None
        self._open: set[asyncio.Task[None]] = set()
        self._listeners: dict[str, threading.Thread] = {}
        self._is_started = threading.Event()
        self._is_open = self._is_stopped = False

    def start(self, cpus: int) -> None:
        """Start the replicas, on so many CPUs of this machine or on a cluster. Raises as `connect` and `deploy`."""
        options, count = self._options, self._options.replicas or 1
        share = max(1, cpus // count) if options.ray is None else 1
        ray_border.connect(options.ray, share * count)
        self._handle = ray_border.deploy(
            Replica,
            (replica_options(options), self._secret),
            name=self._name,
            count=count,
            cpus=share,
            max_calls=options.decode_concurrency + options.max_waiting + OTHER_CALLS,
        )
        self._streams = self._handle.options(stream=True)
        self._relay = Relay(self._streams.answer.remote, self._prompts.ask_of, self.switchboard)
        self._is_open = True
        self._is_started.set()
        _wait(lambda: len(self.names) >= count)  # Ray Serve tells the router a little later

    @property
    def names(self) -> list[str]:
        return self.switchboard.names

    @property
    def is_healthy(self) -> bool:
        return self._is_open and bool(self.names)

    def ask(self, opened: OpenRequest) -> None:
        """Send a request to a replica. ApiError: the server stops, or has no replica (503)."""
        if not self.is_healthy:
            raise ApiError(503, "the server is stopping, or none of its replicas runs.", retry_after_s=END_S)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._relay.answer(opened))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        opened.on_cancel = partial(loop.call_soon_threadsafe, task.cancel)

    def admin(self, name: str, request: AdminRequest) -> AdminReply:
        """The reply of one replica to an admin. ApiError: there is none (503)."""
        try:
            reply: AdminReply = self._handle.admin.remote(request, to=name).result(timeout_s=ADMIN_S)
            return reply
        except (*ray_border.GONE, TimeoutError) as error:
            raise ApiError(503, f"replica {name} does not answer: {type(error).__name__}.") from error

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, wait so many seconds for replies, then end them and the replicas."""
        self._is_open = False
        if self._is_stopped:
            return
        self._is_stopped = True
        self._is_started.set()
        names = self.names
        if self._handle is not None and names:
            with ThreadPoolExecutor(len(names)) as together:
                list(together.map(partial(self._stop, drain_s), names))
            _wait(lambda: not self._open and not any(each.is_alive() for each in [*self._listeners.values()]))
        self._prompts.close()
        ray_border.disconnect(self._name, is_local=self._options.ray is None)

    def _stop(self, drain_s: float, name: str) -> None:
        try:
            self._handle.stop.remote(drain_s, to=name).result(timeout_s=drain_s + END_S)
        except (*ray_border.GONE, TimeoutError) as error:
            logger.warning("replica %s did not end by itself: %s", name, type(error).__name__)

    def _listen(self, names: set[str]) -> None:
        for name in names - self._listeners.keys():
            listener = threading.Thread(target=self._follow, args=(name,), name=f"news of {name}", daemon=True)
            self._listeners[name] = listener
            listener.start()

    def _follow(self, name: str) -> None:
        """Learn the news of a replica until it is gone."""
        self._is_started.wait()
        while self._is_open and name in self.names:
            try:
                for news in self._streams.news.remote(to=name):
                    self.switchboard.learn(name, news)
                    for record in news.records:
                        logger.info("%s: %s", name, in_a_line(record))
            except ray_border.GONE as error:
                logger.warning("replica %s does not report its prefixes any more: %s", name, type(error).__name__)
                time.sleep(PAUSE_S)


def _wait(holds: Callable[[], bool]) -> None:
    """Wait until it holds, END_S at most."""
    deadline_s = time.monotonic() + END_S
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)


class RoutedPrompts:
    """Makes digests of prompts, on threads of its own. ModelError, WarmFileError: an option is wrong."""

    def __init__(self, options: ServeOptions, secret: bytes) -> None:
        assert options.model is not None
        self._options, self._secret, self._model = options, secret, options.model
        # No weights are loaded, and the files belong to the replicas.
        self._models = Models(replace(options, disk=None, redis=None, trace=None, warm=None))
        outline = outline_of(options.model, options)
        self._tokenizer = outline.tokenizer
        limit = None if options.context is not None else outline.context_length
        self._most_tokens = COUNTED_CONTEXTS * (limit or UNBOUNDED_TOKENS)
        for entry in read_warm_file(options.warm) if options.warm else ():
            entry.tokens(self._tokenizer, options)  # raises here rather than in several processes
        self._threads = FairThreads(2, 1, "tokens")

    async def ask_of(self, request: Request) -> Ask:
        return await asyncio.wrap_future(self._threads.submit(request.client, self._ask_of, request))

    async def count_tokens(self, request: Request) -> int:
        return await asyncio.wrap_future(self._threads.submit(request.client, self._count, request))

    def close(self) -> None:
        self._threads.close()

    def _ask_of(self, request: Request) -> Ask:
        try:
            tokens = self._tokens(request)
        except ApiError:
            tokens = None
        if tokens is None:
            return Ask((), 0)
        root = root_digest(self._model, request.namespace, self._secret)
        return Ask(chain_digests(np.asarray(tokens), root), len(tokens))

    def _count(self, request: Request) -> int:
        tokens = self._tokens(request)
        return len(self._models.rendering(request).result().tokens if tokens is None else tokens)

    def _tokens(self, request: Request) -> Any:
        """The prompt's tokens; None: it is for another model than the server's."""
        if self._options.key_of(request.names) != self._options.key_of(ModelNames()):
            return None
        args, more = self._options.chat_template_args, {"special_tokens": self._options.special_tokens_in_text}
        return prompt_of(request, self._tokenizer, args, most_tokens=self._most_tokens, **more).tokens


def replica_options(options: ServeOptions) -> ServeOptions:
    """The options of a replica: its share of the budget, and no keys, which the application checks."""
    count, budget_bytes = options.replicas or 1, options.budget_bytes
    if budget_bytes is None and options.ray is None:
        budget_bytes, _ = default_budget_bytes(None)  # the replicas of one machine share the budget of one cache
    if budget_bytes is not None:
        budget_bytes = max(1, budget_bytes // count)
    mine: dict[str, Any] = {"api_keys": None, "admin_key_file": None, "namespace_by": "none"}
    mine["only_model"] = options.is_only_model
    return replace(options, **mine, budget_bytes=budget_bytes, host="127.0.0.1", replicas=None, router=None, ray=None)


def make_replicas_app(options: ServeOptions, fleet: Fleet) -> FastAPI:
    """Return the application; `fleet` need not have started. KeyFileError: a file of keys cannot be used."""
    scrape = Scrape(fleet.switchboard.counts)
    # Replicas end replies in time; this ends the replies of a replica that fails to.
    patient = replace(options, request_timeout_s=options.request_timeout_s + END_S)
    memory = ResponseMemory()
    return assemble_app(patient, fleet, replica_routes(fleet, scrape, memory), scrape.on_http, memory)
