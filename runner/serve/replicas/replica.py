"""Replica: a model, a cache and their generation thread, in a process of Ray Serve's. What Fleet calls, it answers.

    answer    Request ──▶ the answers of runner.serve.request, those that are there at a time in one list
    tell      ──▶ Told, whenever there is news, as long as somebody listens
    admin     an HTTP request to the routes of the cache ──▶ its response
    stop      Scheduler.stop

The argument `to` of each is for the request router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from radixcache.errors import CacheClosedError
from radixcache.observe.hints import Edge
from radixcache.tree.history import Event
from runner.serve.app import make_app
from runner.serve.metrics import Watch
from runner.serve.options import ServeOptions
from runner.serve.replicas.switchboard import AdminReply, AdminRequest, Routed, Telling, Told, called
from runner.serve.request import ApiError, Ended, Failed, OpenRequest, ReplyEvent, Request, RequestRecord
from runner.serve.scheduler import Scheduler

#: Between two looks for news, in seconds, and what share of the time finding out may take.
PAUSE_S, SHARE = 0.1, 0.05
#: Ends of requests that wait to be told.
MAX_RECORDS = 4096


class Replica:
    """Serves one model.

    Args:
        options: of the server, without what is the application's: keys, replicas.
        secret: what digests are made with.

    Raises:
        ValueError, ModelError, OSError: as for Scheduler and its start.
    """

    def __init__(self, options: ServeOptions, secret: bytes) -> None:
        logging.basicConfig(level=logging.WARNING)
        self._options, self._secret = options, secret
        self._watch = Watch()
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._changes = 0
        self._running = Scheduler(options, self._on_record, self._on_event)
        self._app = make_app(options, self._running, self._watch)
        self._is_stopping = self._has_ended = False
        self._running.start()

    async def answer(self, asked: Request, *, to: Routed) -> AsyncIterator[list[ReplyEvent]]:
        """Serve a request; the last answer is Ended or Failed. Whoever stops listening cancels it."""
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[ReplyEvent]()
        opened = OpenRequest(asked, lambda answer: loop.call_soon_threadsafe(answers.put_nowait, answer), to.id)  # type: ignore[arg-type]
        timer = loop.call_later(self._options.request_timeout_s, opened.cancel)
        try:
            self._running.ask(opened)
            is_over = False
            while not is_over:
                some = [await answers.get()]
                while not answers.empty():
                    some.append(answers.get_nowait())
                is_over = isinstance(some[-1], Ended | Failed)
                yield some
        except ApiError as error:
            yield [Failed(error.status, error.message, retry_after_s=error.retry_after_s)]
        finally:
            timer.cancel()
            opened.cancel()

    async def tell(self, *, to: str) -> AsyncIterator[Told]:
        """Tell what is stored, then what changes, until the replica has ended."""
        telling = Telling(str(self._options.model), self._secret)
        known, is_first, is_last = -1, True, False
        while not is_last:
            is_last = self._has_ended  # before the look, which then finds all there is
            began_s, changes = time.perf_counter(), self._changes
            if changes != known:
                known = changes
                added, removed = await asyncio.to_thread(lambda: telling.changes(self._edges()))
                told = Told(added, removed, self._new_records())
                if is_first or added or removed or told.records:
                    is_first = False
                    yield told
            await asyncio.sleep(max(PAUSE_S, (time.perf_counter() - began_s) / SHARE))

    async def admin(self, request: AdminRequest, *, to: str) -> AdminReply:
        """ReplyEvent what an admin asked; who may is known where the request came in."""
        return await called(self._app, request)

    async def stop(self, drain_s: float, *, to: str) -> None:
        """Take nothing in any more, and end what runs in so many seconds."""
        self._is_stopping = True
        await asyncio.to_thread(self._running.stop, drain_s)
        self._has_ended = True

    def check_health(self) -> None:
        """Raise where nothing can be served: then Ray starts another replica in the place of this one."""
        if not self._running.is_healthy and not self._is_stopping:
            raise RuntimeError("the generation thread has failed.")

    def _edges(self) -> list[Edge]:
        """What the cache of the server's own model has stored."""
        for names, cache in self._running.caches():
            if names.model == self._options.model and names.adapter == self._options.adapter_path:
                try:
                    return cache.edges()
                except CacheClosedError:
                    break
        return []

    def _new_records(self) -> list[RequestRecord]:
        return [self._records.popleft() for _ in range(len(self._records))]

    # By the generation thread

    def _on_record(self, record: RequestRecord) -> None:
        self._watch.on_record(record)
        self._records.append(record)
        self._changes += 1

    def _on_event(self, event: Event) -> None:
        self._watch.on_event(event)
        self._changes += 1
