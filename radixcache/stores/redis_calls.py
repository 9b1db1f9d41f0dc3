"""Calls: commands to a Redis or Valkey server. A caller waits up to a limit, and not at all while the server is down.

    ask ──► breaker ──► a thread: one round trip ──► replies, or None

    closed ── failed ──► open ── pause is over: one trial ──► closed    the trial succeeded
                          ▲                             └───► open      it failed: the pause doubles

  N1  No call raises for what the server or the network does; each failure is counted by its kind.
  N2  A caller waits for a call until its limit. Then the connection is closed, even if bytes still arrive.
  N3  After a failure the breaker is open: no caller waits, and one trial at a time asks the server, in a thread.
  N4  The URL may hold a password. It is in no message, no repr and no error.
  N5  Each pause is twice the last one, up to `MAX_PAUSE_S`. After a longer time without failures than the last pause,
      the next one is `FIRST_PAUSE_S` again.

Methods may be called from any thread. The clock is an argument.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from radixcache.counters import Tally
from radixcache.errors import StoreError

if TYPE_CHECKING:
    from redis import Redis

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
#: A slower call is given up, as prefill is faster.
SLOWEST_BYTES_PER_S = 16 << 20
#: Calls at a time: one looks up, two read, one writes.
THREADS = 4

Command = tuple[Any, ...]
Replies = list[Any]


class Breaker:
    """Whether a server may be asked. `pause_s`: the present or the last pause; 0: there was none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.is_open = self._is_tried = False
        self._since_s = clock()
        self.pause_s = 0.0

    def failed(self) -> bool:
        """A call or the trial failed. True: this failure opened the breaker."""
        with self._lock:
            if self.is_open and not self._is_tried:
                return False
            now_s, was_closed = self._clock(), not self.is_open
            was_well = was_closed and now_s - self._since_s > self.pause_s
            self.pause_s = FIRST_PAUSE_S if was_well else min(max(2 * self.pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
            self.is_open, self._is_tried, self._since_s = True, False, now_s
            return was_closed

    def may_try(self) -> bool:
        """Whether the pause is over. Then the caller must try the server and report the result."""
        with self._lock:
            if not self.is_open or self._is_tried or self._clock() - self._since_s < self.pause_s:
                return False
            self._is_tried = True
            return True

    def recovered(self) -> None:
        with self._lock:
            self.is_open, self._is_tried, self._since_s = False, False, self._clock()


class Calls:
    """The calls of one store. Arguments and errors as for RedisStore."""

    def __init__(self, url: str, timeout_s: float, clock: Callable[[], float], tally: Tally) -> None:
        self._tally = tally
        self._client = _client(url, timeout_s)
        self._timeout_s: float = self._client.connection_pool.connection_kwargs["socket_timeout"]
        self._breaker = Breaker(clock)
        self._threads = ThreadPoolExecutor(THREADS, "radixcache-redis")
        self.trial: Future[None] | None = None  # the last one

    @property
    def is_down(self) -> bool:
        return self._breaker.is_open

    def is_up(self) -> bool:
        """Whether the server may be asked. If not, count that, and start a trial if the pause is over."""
        if not self._breaker.is_open:
            return True
        self._tally.add_to("failed_calls", "not asked")
        if self._breaker.may_try():
            self.trial = self._threads.submit(self._try)
        return False

    def limit_s(self, nbytes: int) -> float:
        return self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def ask(self, commands: Sequence[Command], nbytes: int = 0) -> Replies | None:
        """Replies to commands in one round trip, None for a refused command; None: the server does not answer."""
        ends_s = time.monotonic() + self.limit_s(nbytes)
        return self.wait(self.begin(commands, lambda replies: replies), ends_s)

    def begin(self, commands: Sequence[Command], finish: Callable[[Replies], T]) -> Future[T] | None:
        """As `ask`, without waiting; the thread calls `finish`."""
        return self._threads.submit(lambda: finish(self._sent(commands))) if self.is_up() else None

    def wait(self, call: Future[T] | None, ends_s: float) -> T | None:
        """The result of a call; None: it was not made, failed, or reached its limit, by time.monotonic()."""
        if call is None:
            return None
        try:
            return call.result(max(0.0, ends_s - time.monotonic()))
        except Exception as error:
            self._tally.add_to("failed_calls", _kind(error))
            if self._breaker.failed():
                words = "Redis: %s. The server is not asked for %g s; requests are served without it."
                logger.warning(words, _kind(error), self._breaker.pause_s)
            self._client.connection_pool.disconnect()
            return None

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _sent(self, commands: Sequence[Command]) -> Replies:
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
            self._sent([("PING",)])
        except Exception as error:
            self._tally.add_to("failed_calls", _kind(error))
            self._breaker.failed()
        else:
            self._breaker.recovered()
            logger.info("Redis answers again.")


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
        made.make_connection()  # connects nowhere, and refuses unknown options
    except Exception:
        made = None
    if made is None:  # raised out here, the error has no cause that quotes the URL
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
