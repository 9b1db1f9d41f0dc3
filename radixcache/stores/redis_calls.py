"""Calls: commands to a Redis or Valkey server. A caller waits up to a limit, and not at all while the server is down.

    ask ──► is it up? ──► a thread: one round trip ──► replies, or None

    up ── a call fails ──► down ── every `PAUSE_S`, when `is_up` is called: PING ──► up, if the server answers

  N1  No call raises for a failure of the server or the network; each failure is counted by its kind.
  N2  A caller waits for a reply until its time limit. Then the connection is closed, even if bytes still arrive.
  N3  After a failure no caller waits: a thread sends one PING at a time, to see whether the server answers again.
  N4  The URL may hold a password, so no message, no repr and no error shows the URL.

Methods may be called from any thread. The clock is an argument.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from radixcache.counters import Tally
from radixcache.errors import StoreError

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

#: From a failure to the next PING.
PAUSE_S = 10.0
#: A transfer that is slower than this is given up: prefill is faster.
SLOWEST_BYTES_PER_S = 16 << 20
#: Calls at the same time: one looks up, two read, one writes.
THREADS = 4

Command = tuple[Any, ...]
Replies = list[Any]


class Calls:
    """The calls of one store. Arguments and errors as for RedisStore."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float], tally: Tally) -> None:
        self._tally = tally
        self._client = _client(url, timeout_s)
        self._timeout_s: float = self._client.connection_pool.connection_kwargs["socket_timeout"]
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, "radixcache-redis")
        self._lock = threading.Lock()
        self._failed_s = 0.0
        self.is_down = False
        self.trial: Future[None] | None = None  # the last PING

    def is_up(self) -> bool:
        """Whether the server is up. If not, count the call that is not made, and send a PING if the pause is over."""
        if not self.is_down:
            return True
        self._tally.add_to("failed_calls", "not asked")
        with self._lock:
            is_tried = self.trial is not None and not self.trial.done()
            if not is_tried and self._clock() - self._failed_s >= PAUSE_S:
                self.trial = self._threads.submit(self._try)
        return False

    def limit_s(self, nbytes: int) -> float:
        return self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def ask(self, commands: Sequence[Command], nbytes: int = 0, *, ends_s: float | None = None) -> Replies | None:
        """Send commands in one round trip; return a reply for each, None if refused. None alone: no answer.

        Args:
            nbytes: how much is sent or received; it sets the time limit.
            ends_s: when to stop waiting, by time.monotonic(); in place of the limit from `nbytes`.
        """
        if not self.is_up():
            return None
        limit_s = self.limit_s(nbytes) if ends_s is None else max(0.0, ends_s - time.monotonic())
        try:
            return self._threads.submit(self._send, commands).result(limit_s)
        except Exception as error:
            self._note_failure(error)
            self._client.connection_pool.disconnect()
            return None

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _send(self, commands: Sequence[Command]) -> Replies:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = pipeline.execute(raise_on_error=False)
        for error in replies:
            if isinstance(error, Exception):
                self._tally.add_to("failed_calls", _kind(error))
        return [None if isinstance(each, Exception) else each for each in replies]

    def _try(self) -> None:
        try:
            self._send([("PING",)])
        except Exception as error:
            self._note_failure(error)
        else:
            self.is_down = False
            logger.info("Redis answers again.")

    def _note_failure(self, error: Exception) -> None:
        self._tally.add_to("failed_calls", _kind(error))
        with self._lock:
            was_down, self.is_down, self._failed_s = self.is_down, True, self._clock()
        if not was_down:
            words = "Redis: %s. The server is not asked for %g s; requests are served without it."
            logger.warning(words, _kind(error), PAUSE_S)


def _client(url: str, timeout_s: float) -> Redis:
    try:
        from redis import ConnectionPool, Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError:
        raise StoreError("RedisStore needs the package redis: pip install 'radixcache[redis]'.") from None
    made = None
    try:
        made = ConnectionPool.from_url(url)
        timeout_s = made.connection_kwargs.get("socket_timeout", timeout_s)
        if not 0 < timeout_s < math.inf:
            raise ValueError
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
        made.connection_kwargs.update(**limits, decode_responses=False)
        made.make_connection()  # opens no connection, but refuses unknown options
    except Exception:
        made = None
    if made is None:  # outside of `except`, so the error has no cause that shows the URL
        raise ValueError("not the URL of a Redis server; wanted redis://, rediss:// or unix://, as redis-py has it.")
    return Redis(connection_pool=made)


def _kind(error: BaseException) -> str:
    """The kind of an error, without the address of the server."""
    from redis import exceptions

    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return "timed out"
    if isinstance(error, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
        return "not allowed"
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return "not reached"
    return "refused" if isinstance(error, exceptions.ResponseError) else "failed"
