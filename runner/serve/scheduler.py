"""Running: the generation thread, which owns MLX, and the way in for all others.

    arrived    by ask, any thread
    waiting    in the thread, in order of arrival, until their model is loaded
    begun      handed to the model, which admits them as there is room

Requests for a model that is not loaded wait until those that run are through. Then it is loaded, and all that wait for
it begin; who came for the model before has to wait in turn, so nobody starves.

Invariants, each with a test:

  R1  Every opened gets exactly one Ended or Failed, also where the thread dies.
  R2  What is raised for one opened ends that opened alone.
  R3  Arrays are made, used and let go of on the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from radixcache import PrefixCache, RadixCacheError
from radixcache.stores.store import StoreStats
from radixcache.tree.history import OnEvent
from runner.models.load import ModelError
from runner.serve import mlx_lm_border
from runner.serve.models import Models
from runner.serve.options import ServeOptions, require_compatible
from runner.serve.request import ApiError, ModelNames, OpenRequest, Request, RequestRecord
from runner.serve.served_model import Answering

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which who was turned away may ask again: some replies are through by then.
RETRY_AFTER_S = 5


class _Waiting(NamedTuple):
    key: ModelNames
    answering: Answering


class Running:
    """Answers jobs, one thread for all of them.

    Args:
        on_record: called by the thread at each opened's end.
        on_event: the listener of every cache.

    Raises:
        ValueError: options that contradict each other.
    """

    def __init__(
        self, options: ServeOptions, on_record: Callable[[RequestRecord], None], on_event: OnEvent | None = None
    ) -> None:
        require_compatible(options)
        self._options, self._on_record, self._on_event = options, on_record, on_event
        self._models: Models | None = None
        self._thread: threading.Thread | None = None
        # What several threads change, under this:
        self._changed = threading.Condition()
        self._arrived: list[Answering] = []
        self._calls: deque[tuple[Callable[[Models], Any], Future[Any]]] = deque()
        self._answering: set[Answering] = set()
        self._is_open = False
        self._deadline_s: float | None = None

    # For any thread

    def start(self) -> None:
        """Start the thread, and wait until the model that was named is loaded and what is to be warm is.

        Raises:
            ModelError: there is no such model.
            ValueError: an option out of its range, or a file that cannot be used.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="generation")
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.stop(0)
            raise

    def ask(self, opened: OpenRequest) -> None:
        """Take a request in.

        Raises:
            ApiError: there are too many (429), or the server stops or has failed (503).
        """
        with self._changed:
            self._require_open(len(self._answering))
            answering = Answering(opened, self._on_record)
            self._answering.add(answering)
            self._arrived.append(answering)
            self._changed.notify_all()

    def call(self, function: Callable[[Models], T]) -> Future[T]:
        """Have the thread call a function between two rounds; the future has what it returns or raises.

        Raises:
            ApiError: as `ask` does.
        """
        future: Future[T] = Future()
        with self._changed:
            self._require_open(len(self._calls))
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    async def count_tokens(self, asked: Request) -> int:
        """How many tokens a prompt has. ApiError: it cannot be made, or there is no such model."""

        def count(models: Models) -> int:
            try:
                return models.count_tokens(asked)
            except ModelError as error:
                raise ApiError(404, str(error), param="model") from error

        return await asyncio.wrap_future(self.call(count))

    @property
    def is_healthy(self) -> bool:
        """Whether requests are answered."""
        return self._is_open and self._thread is not None and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests that were not admitted yet."""
        with self._changed:
            return sum(not each.is_running for each in self._answering)

    @property
    def running(self) -> int:
        """Requests that are prefilled or decoded."""
        with self._changed:
            return sum(each.is_running for each in self._answering)

    def caches(self) -> list[tuple[ModelNames, PrefixCache]]:
        """The caches of all models that were loaded so far, the last one's last."""
        return [] if self._models is None else self._models.caches()

    def store_stats(self) -> dict[str, StoreStats]:
        """What each store behind the caches has and did, by what it is called."""
        return {} if self._models is None else self._models.store_stats()

    def stop(self, drain_s: float) -> None:
        """Take nothing in any more, give what is there so many seconds, end it with what it has, and wait for that.

        A second call may shorten the time.
        """
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
            raise ApiError(
                429,
                f"{held} requests run or wait, and that is all that may; ask again later.",
                retry_after_s=RETRY_AFTER_S,
            )

    # The thread

    def _run(self, started: Future[None]) -> None:
        try:
            self._models = models = Models(self._options, self._on_event)
            try:
                mlx_lm_border.maybe_set_recommended_wired_limit()
                if self._options.model is not None:
                    models.open(models.key_of(ModelNames()))
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
            # A thread that ends with streams of its own takes the process with it.
            mx.clear_streams()

    def _serve(self, models: Models) -> None:
        waiting: deque[_Waiting] = deque()
        while self._wait(is_busy=bool(waiting) or not _is_idle(models)):
            with self._changed:
                arrived, self._arrived = self._arrived, []
                is_late = self._deadline_s is not None and time.perf_counter() >= self._deadline_s
            if is_late:
                for answering in self._answering:
                    answering.opened.cancel()
            self._run_call(models)
            waiting.extend(_addressed(arrived, models))
            self._begin(models, waiting)
            if models.current is not None:
                models.current.round()
            with self._changed:
                self._answering = {each for each in self._answering if not each.is_over}

    def _wait(self, *, is_busy: bool) -> bool:
        """Wait until there is something to do; False: there is no more, and nothing will come."""
        with self._changed:
            if not is_busy:
                self._changed.wait_for(lambda: self._arrived or self._calls or self._deadline_s is not None)
            return is_busy or bool(self._arrived or self._calls) or self._deadline_s is None

    def _run_call(self, models: Models) -> None:
        if self._calls:  # one a round, or who counts tokens without end would keep all others waiting
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(models))
                except Exception as error:
                    future.set_exception(error)

    def _begin(self, models: Models, waiting: deque[_Waiting]) -> None:
        """Hand to the model what waits for it; where the first waits for another one, that is loaded once it may."""
        for each in [each for each in waiting if each.answering.opened.is_cancelled]:
            waiting.remove(each)
            each.answering.end("cancelled")
        while waiting:
            key, served, begin = waiting[0].key, models.current, [waiting[0]]
            if served is None or served.key != key:
                if not _is_idle(models):
                    return
                try:
                    served = models.open(key)
                except Exception as error:
                    is_theirs = isinstance(error, (RadixCacheError, ValueError))
                    waiting.popleft().answering.fail(404 if is_theirs else 500, str(error))
                    continue
                begin = [each for each in waiting if each.key == key]
            for each in begin:
                waiting.remove(each)
                try:
                    served.begin(each.answering)
                except Exception as error:
                    logger.exception("a request could not be begun")
                    each.answering.fail(500, f"{type(error).__name__}: {error}")

    def _end_all(self) -> None:
        """Nothing will be answered any more: say so to whoever waits for it."""
        with self._changed:
            self._is_open = False
            calls, self._calls = [*self._calls], deque()
            left, self._answering = self._answering, set()
        for answering in left:
            answering.fail(503, "the generation thread has failed.")
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ApiError(503, "the server is stopping."))


def _addressed(arrived: list[Answering], models: Models) -> Iterator[_Waiting]:
    for answering in arrived:
        try:
            yield _Waiting(models.key_of(answering.opened.request.names), answering)
        except ApiError as error:
            answering.fail(error.status, error.message)


def _is_idle(models: Models) -> bool:
    return models.current is None or models.current.is_idle
