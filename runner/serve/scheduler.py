"""Scheduler: the generation thread, the only one that uses MLX, and calls to it from other threads.

    arrived    requests that any thread gave to `ask`
    waiting    requests on the generation thread, in order of arrival, until their model is loaded
    submitted  requests that the model has; it begins each when its prompt is made

A request for a model that is not loaded waits until the running requests have finished. Then the model is loaded, and
all requests for it begin. New requests for the former model wait in turn, so no request starves. Each round ends
requests that were cancelled: waiting requests here, submitted ones in `ServedModel.round`.

Invariants, each with a test:

  R1  Every request gets exactly one RequestRecord or ApiError, also if the thread dies.
  R2  An exception for one request ends only that request.
  R3  Arrays are made, used and freed on the generation thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

from radixcache import PrefixCache
from radixcache.stores.block_store import StoreStats
from radixcache.tree.history import OnEvent
from runner.serve import mlx_lm_border
from runner.serve.models import Models
from runner.serve.options import ServeOptions, require_compatible
from runner.serve.prompts import RenderedPrompt
from runner.serve.request import ApiError, ModelNames, OpenRequest, Request, RequestRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_AFTER_S = 5  # a refused client may ask again after this time: some replies have ended by then


class Scheduler:
    """Answers requests on one thread. ValueError: options that contradict each other.

    The thread calls `on_record` at the end of each request; `on_event` is the listener of every cache.
    """

    def __init__(
        self, options: ServeOptions, on_record: Callable[[RequestRecord], None], on_event: OnEvent | None = None
    ) -> None:
        require_compatible(options)
        self._options, self._on_record, self._on_event = options, on_record, on_event
        self._models: Models | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the fields below
        self._arrived: list[OpenRequest] = []
        self._calls: deque[tuple[Callable[[Models], Any], Future[Any]]] = deque()
        self._open: set[OpenRequest] = set()
        self._is_open = False
        self._deadline_s: float | None = None

    def start(self) -> None:
        """Start the thread; wait until the model is loaded and warm. ValueError: an option cannot be used."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="generation")
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.stop(0)
            raise

    def ask(self, opened: OpenRequest) -> None:
        """Accept a request. ApiError: there are too many (429), or the server stops or has failed (503)."""
        with self._changed:
            self._require_open(len(self._open))
            opened.on_record = self._on_record
            self._open.add(opened)
            self._arrived.append(opened)
            self._changed.notify_all()

    def call(self, function: Callable[[Models], T]) -> Future[T]:
        """Call a function on the generation thread between two rounds; return a future. ApiError: as for `ask`."""
        future: Future[T] = Future()
        with self._changed:
            self._require_open(len(self._calls))
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    async def count_tokens(self, request: Request) -> int:
        return len((await self.prompt(request)).tokens)

    async def prompt(self, request: Request) -> RenderedPrompt:
        """Make a prompt on another thread. ApiError: it cannot be made, or there is no such model."""
        rendering = await asyncio.wrap_future(self.call(lambda models: models.rendering(request)))
        return await self.result_of(rendering)

    async def result_of(self, future: Future[T]) -> T:
        """Wait for the result of another thread. ApiError: the server is stopping, which has cancelled the work."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._require_open(0)
            raise

    @property
    def is_healthy(self) -> bool:
        return self._is_open and self._thread is not None and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(not each.is_running for each in self._open)

    @property
    def running(self) -> int:
        with self._changed:
            return sum(each.is_running for each in self._open)

    def caches(self) -> list[tuple[ModelNames, PrefixCache]]:
        """The caches of all models loaded so far, the current one last."""
        return [] if self._models is None else self._models.caches()

    def store_stats(self) -> dict[str, StoreStats]:
        return {} if self._models is None else self._models.store_stats()

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, cancel the open ones after `drain_s`, and wait. A second call may shorten the time."""
        with self._changed:
            self._is_open = False
            deadline_s = time.perf_counter() + drain_s
            self._deadline_s = deadline_s if self._deadline_s is None else min(deadline_s, self._deadline_s)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _require_open(self, held: int) -> None:
        if not self.is_healthy:
            raise ApiError(503, "the server is stopping, or its generation thread has failed.")
        if held >= self._options.decode_concurrency + self._options.max_waiting:
            message = f"{held} requests run or wait, which is the most that may; ask again later."
            raise ApiError(429, message, retry_after_s=RETRY_AFTER_S)

    def _run(self, started: Future[None]) -> None:
        try:
            self._models = models = Models(self._options, self._on_event)
            try:
                mlx_lm_border.maybe_set_recommended_wired_limit()
                if self._options.model is not None:
                    models.open(self._options.key_of(ModelNames()))
                self._is_open = True
                started.set_result(None)
                self._serve(models)
            except BaseException:
                self._end_all()
                raise
            finally:
                models.close()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            else:
                logger.exception("the generation thread died")
        finally:
            self._end_all()
            # Ending the thread while it owns MLX streams would end the process.
            mx.clear_streams()

    def _serve(self, models: Models) -> None:
        waiting: deque[tuple[ModelNames, OpenRequest]] = deque()
        while self._wait(is_busy=bool(waiting) or not _is_idle(models)):
            with self._changed:
                arrived, self._arrived = self._arrived, []
                is_late = self._deadline_s is not None and time.perf_counter() >= self._deadline_s
            if is_late:
                for opened in self._open:
                    opened.cancel()
            self._run_call(models)
            for opened in arrived:
                try:
                    opened.record.names = self._options.key_of(opened.request.names)
                    waiting.append((opened.record.names, opened))
                except ApiError as error:
                    opened.fail(error)
            self._begin(models, waiting)
            if models.current is not None:
                models.current.round()
            with self._changed:
                self._open = {each for each in self._open if not each.is_over}

    def _wait(self, *, is_busy: bool) -> bool:
        """Wait until there is work. False: the server is stopping and no work is left."""
        with self._changed:
            if not is_busy:
                self._changed.wait_for(lambda: self._arrived or self._calls or self._deadline_s is not None)
            return is_busy or bool(self._arrived or self._calls) or self._deadline_s is None

    def _run_call(self, models: Models) -> None:
        """Run one call; only one in each round, so that a client that counts tokens all the time delays no reply."""
        if self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(models))
                except Exception as error:
                    future.set_exception(error)

    def _begin(self, models: Models, waiting: deque[tuple[ModelNames, OpenRequest]]) -> None:
        """Begin waiting requests. If the first one is for another model, load it once the current model is idle."""
        for each in [each for each in waiting if each[1].is_cancelled]:
            waiting.remove(each)
            each[1].end("cancelled")
        while waiting:
            (key, first), served = waiting[0], models.current
            begin = [waiting[0]]
            if served is None or served.key != key:
                if not _is_idle(models):
                    return
                try:
                    served = models.open(key)
                except Exception as error:
                    waiting.popleft()
                    first.fail(models.refusal(key, error))
                    continue
                begin = [each for each in waiting if each[0] == key]
            for each in begin:
                waiting.remove(each)
                served.submit(each[1])

    def _end_all(self) -> None:
        with self._changed:
            self._is_open = False
            calls, self._calls = [*self._calls], deque()
            left, self._open = self._open, set()
        for opened in left:
            opened.fail(ApiError(503, "the generation thread has failed."))
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ApiError(503, "the server is stopping."))


def _is_idle(models: Models) -> bool:
    return models.current is None or models.current.is_idle
