"""How answers come from the generation thread to the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runner.engine.token import Token
from runner.serve.request import ModelNames, OpenRequest, PrefillProgress, Request
from runner.serve.service import ServedReply, Service
from tests.serve.scripted import PROMPT_TOKENS, ScriptedReading, ScriptedRuns, said


class BurstRuns(ScriptedRuns):
    def ask(self, opened: OpenRequest) -> None:
        self.opened.append(opened)
        if len(self.opened) == 2:
            for each in self.opened.copy():
                super().ask(each)


def test_the_loop_is_woken_once_for_what_comes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = []

    async def texts(reply: ServedReply) -> str:
        return "".join([part.text async for part in reply if isinstance(part, Token)])

    async def both() -> list[str]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: Any) -> asyncio.Handle:
            wakes.append(args)
            return wake(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        asking = Service(BurstRuns(said("one "), said("two")), timeout_s=60)
        asked = Request(ModelNames(), 8)
        replies = await asyncio.gather(asking.ask(asked), asking.ask(asked))
        return [await texts(reply) for reply in replies]

    assert asyncio.run(both()) == ["one two", "one two"]
    assert len(wakes) == 1


def test_the_time_limit_of_a_request_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    delays_s = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def noted(delay_s: float, *args: Any) -> asyncio.TimerHandle:
            delays_s.append(delay_s)
            return later(delay_s, *args)

        monkeypatch.setattr(loop, "call_later", noted)
        reply = await Service(ScriptedRuns(said("x")), timeout_s=60).ask(Request(ModelNames(), 8))
        assert [part.text async for part in reply if isinstance(part, Token)] == ["x", ""]

    asyncio.run(ask())
    assert delays_s == [60]


def test_a_reply_that_another_replica_starts_anew_goes_on() -> None:
    class Restarted(ScriptedRuns):
        def ask(self, opened: OpenRequest) -> None:
            # By a replica that ended before its first token.
            opened.put(PrefillProgress(0, PROMPT_TOKENS, ScriptedReading([said("x")], Token(""))))
            super().ask(opened)

    async def ask() -> list[Any]:
        runs = Restarted(PrefillProgress(8, PROMPT_TOKENS), said("x"))
        reply = await Service(runs, timeout_s=60).ask(Request(ModelNames(), 8))
        return [part.text if isinstance(part, Token) else (part, reply.cached_tokens) async for part in reply]

    assert asyncio.run(ask()) == [(PrefillProgress(8, PROMPT_TOKENS), 8), "x", ""]
