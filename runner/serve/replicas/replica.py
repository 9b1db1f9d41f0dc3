"""Replica: a model, a cache and their generation thread, in a process of Ray Serve. A Fleet calls it.

The argument `to` of each method is for the request router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from radixcache.errors import CacheClosedError
from radixcache.observe.hints import Edge
from radixcache.tree.history import Event
from runner.serve.app import make_app
from runner.serve.metrics import Watch
from runner.serve.options import ServeOptions
from runner.serve.replicas import switchboard
from runner.serve.request import ApiError, OpenRequest, ReplyEvent, Request, RequestRecord
from runner.serve.scheduler import Scheduler

PAUSE_S, SHARE = 0.1, 0.05  # seconds between two checks for news, and the share of time that checks may take
MAX_RECORDS = 4096  # records of ended requests that wait for the next news


class Replica:
    """Serves one model; `options` are those of `replica_options`. Raises as Scheduler and its start."""

    def __init__(self, options: ServeOptions, secret: bytes) -> None:
        logging.basicConfig(level=logging.WARNING)
        self._options, self._secret = options, secret
        self._watch = Watch()
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._changes = 0
        self._scheduler = Scheduler(options, self._on_record, self._on_event)
        self._app = make_app(options, self._scheduler, self._watch)
        self._is_stopping = self._has_ended = False
        self._scheduler.start()

    async def answer(self, request: Request, *, to: switchboard.RoutedRequest) -> AsyncIterator[list[ReplyEvent]]:
        """Serve a request up to its RequestRecord or ApiError. Closing the iterator cancels the request."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[ReplyEvent]()
        opened = OpenRequest(request, lambda event: loop.call_soon_threadsafe(events.put_nowait, event), to.id)  # type: ignore[arg-type]
        timer = loop.call_later(self._options.request_timeout_s, opened.cancel)
        try:
            self._scheduler.ask(opened)
            is_over = False
            while not is_over:
                some = [await events.get()]
                while not events.empty():
                    some.append(events.get_nowait())
                is_over = isinstance(some[-1], RequestRecord | ApiError)
                yield some
        except ApiError as error:
            yield [error]
        finally:
            timer.cancel()
            opened.cancel()

    async def news(self, *, to: str) -> AsyncIterator[switchboard.ReplicaNews]:
        """Yield what is stored, then each change, until the replica has ended."""
        digests = switchboard.DigestChanges(str(self._options.model), self._secret)
        known, is_first, is_last = -1, True, False
        while not is_last:
            is_last = self._has_ended  # read first, so that the last news has everything
            began_s, changes = time.perf_counter(), self._changes
            if changes != known:
                known = changes
                added, removed = await asyncio.to_thread(lambda: digests.update(self._edges()))
                records = [self._records.popleft() for _ in range(len(self._records))]
                if is_first or added or removed or records:
                    is_first = False
                    yield switchboard.ReplicaNews(added, removed, records)
            await asyncio.sleep(max(PAUSE_S, (time.perf_counter() - began_s) / SHARE))

    async def admin(self, request: switchboard.AdminRequest, *, to: str) -> switchboard.AdminReply:
        return await switchboard.call_app(self._app, request)

    async def stop(self, drain_s: float, *, to: str) -> None:
        self._is_stopping = True
        await asyncio.to_thread(self._scheduler.stop, drain_s)
        self._has_ended = True

    def check_health(self) -> None:
        """Raise if nothing can be served: then Ray replaces this replica."""
        if not self._scheduler.is_healthy and not self._is_stopping:
            raise RuntimeError("the generation thread has failed.")

    def _edges(self) -> list[Edge]:
        """What the cache of the server's model stores."""
        for names, cache in self._scheduler.caches():
            if names.model == self._options.model and names.adapter == self._options.adapter_path:
                try:
                    return cache.edges()
                except CacheClosedError:
                    break
        return []

    # Called by the generation thread

    def _on_record(self, record: RequestRecord) -> None:
        self._watch.on_record(record)
        self._records.append(replace(record, keys=None))
        self._changes += 1

    def _on_event(self, event: Event) -> None:
        self._watch.on_event(event)
        self._changes += 1
