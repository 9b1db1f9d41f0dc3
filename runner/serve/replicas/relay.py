"""Relay: one request's way to a replica and its answers' way back. On the event loop; never imports MLX.

RE1  Every job gets exactly one Ended or Failed, also where its replica dies.
RE2  A request of whose reply no token was handed on is asked of another replica when its own dies, RETRIES times.
RE3  By its last answer it is no longer booked as work of a replica: who asks next finds nothing of it that waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from runner.routing.routers import Ask
from runner.serve.asked import Asked, Ended, Failed, Job, Step
from runner.serve.replicas.border import GONE
from runner.serve.replicas.switchboard import Routed, Switchboard

logger = logging.getLogger(__name__)

RETRIES = 2


class Relay:
    """Relays jobs.

    Args:
        call: `call(asked, to=Routed)` has a replica answer: an async iterator of lists of answers, with `cancel()`.
        ask_of: what the switchboard's decision goes by.
    """

    def __init__(
        self, call: Callable[..., Any], ask_of: Callable[[Asked], Awaitable[Ask]], switchboard: Switchboard
    ) -> None:
        self._call, self._ask_of, self._switchboard = call, ask_of, switchboard

    async def answer(self, job: Job) -> None:
        """Put all answers of a job. Cancelled, it has the replica stop."""
        try:
            last = await self._last_answer(job, Routed(job.id, await self._ask_of(job.asked)))
        except asyncio.CancelledError:
            last = Failed(504, "the request was given up: it took too long, or nobody waits for it.")
        except Exception:
            logger.exception("a request could not be handed to a replica")
            last = Failed(500, "the server failed at this request; its log says where.")
        self._switchboard.end(job.id, last.record)
        job.put(last)

    async def _last_answer(self, job: Job, routed: Routed) -> Ended | Failed:
        """Put all answers but the last one, which is returned."""
        for retries in reversed(range(1 + RETRIES)):
            stream, has_steps = self._call(job.asked, to=routed), False
            try:
                async for answers in stream:
                    for answer in answers:
                        if isinstance(answer, Ended | Failed):
                            return answer
                        has_steps |= isinstance(answer, Step)
                        job.put(answer)
            except GONE as error:
                logger.warning("%s: its replica has ended: %s", job.id[:8], type(error).__name__)
            except asyncio.CancelledError:
                stream.cancel()
                raise
            if has_steps or not retries:
                break
        return Failed(503, "the replica that answered has ended; ask again.")
