"""However a request ends, and whatever goes wrong with it, it gets one last answer, and the others theirs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runner.engine.generator import ParallelGenerator
from runner.engine.token import Token
from runner.models.load import LoadedModel
from runner.serve import served_model
from runner.serve.request import ApiError, ModelNames, OpenRequest, PrefillProgress, ReplyEvent, Request
from runner.serve.scheduler import Scheduler
from runner.serve.served_model import ServedModel
from tests.serve.jobs import LONG, MESSAGES, PROMPTS, Waiting, alone, running


def cancel_at(kind: type[ReplyEvent], count: int) -> Callable[[OpenRequest, ReplyEvent], None]:
    """What cancels a request on the thread itself, with the answer of that number of that kind."""
    seen = 0

    def on_answer(opened: OpenRequest, answer: ReplyEvent) -> None:
        nonlocal seen
        seen += isinstance(answer, kind)
        if seen >= count:
            opened.cancel()

    return on_answer


def test_who_leaves_during_prefill_ends_within_a_chunk_and_leaves_what_was_computed(either: Scheduler) -> None:
    left = Waiting(either, prompt=LONG, namespace="left", on_answer=cancel_at(PrefillProgress, 4))
    assert (left.record.outcome, left.record.completion_tokens) == ("cancelled", 0)
    done = [answer.done_tokens for answer in left.answers if isinstance(answer, PrefillProgress)]
    assert len(done) in (4, 5)
    again = Waiting(either, prompt=LONG, namespace="left")
    assert 0 < done[3] - 64 <= again.record.cached_tokens <= done[-1]


def test_who_leaves_during_the_reply_ends_within_a_token_and_leaves_what_was_computed(tiny, either):
    prompt = next(prompt for prompt in PROMPTS if len(alone(tiny, prompt, 40)[0]) == 40)
    left = Waiting(either, prompt=prompt, max_tokens=40, on_answer=cancel_at(Token, 3))
    assert left.record.outcome == "cancelled"
    assert 3 <= left.record.completion_tokens <= 4
    again = Waiting(either, prompt=prompt, max_tokens=40)
    assert again.tokens == alone(tiny, prompt, 40)[0]
    assert again.record.cached_tokens > 0


def test_who_leaves_while_waiting_never_runs() -> None:
    with running(decode_concurrency=1) as thread:
        held = threading.Event()
        thread.call(lambda _: held.wait())
        first, second = Waiting(thread, max_tokens=3), Waiting(thread, max_tokens=3)
        second.opened.cancel()
        held.set()
        assert first.record.completion_tokens > 0
        assert (second.record.outcome, second.record.queue_ms) == ("cancelled", None)
        assert second.answers == [second.record]


def test_a_prompt_that_takes_long_to_make_stalls_nobody_and_later_ones_wait_for_it(shared, slow) -> None:
    running_one = Waiting(shared, max_tokens=300, logit_bias={1: -1e4})
    running_one.until(Token)
    late = [Waiting(shared, prompt=prompt, max_tokens=2) for prompt in ("slow", PROMPTS[0], PROMPTS[1])]
    assert running_one.record.completion_tokens == 300
    assert [waiting.opened.record.prompt_tokens for waiting in late] == [0, 0, 0]
    assert not any(waiting.answers for waiting in late)
    slow.set()
    assert [waiting.record.outcome for waiting in late] == ["length"] * 3
    assert sorted(late, key=lambda waiting: waiting.record.queue_ms + waiting.opened.arrived_s * 1e3) == late


def test_who_leaves_while_its_prompt_is_made_ends_at_once_and_later_ones_are_served(shared, slow) -> None:
    left = Waiting(shared, prompt="slow", max_tokens=2)
    asyncio.run(shared.count_tokens(Request(ModelNames(), 1, prompt="quick")))
    left.opened.cancel()
    assert (left.record.outcome, left.record.prompt_tokens) == ("cancelled", 0)
    assert Waiting(shared, prompt=PROMPTS[0], max_tokens=2).record.outcome == "length"
    assert not slow.is_set()


def test_who_leaves_while_another_model_runs_ends_at_once() -> None:
    with running() as thread:
        long = Waiting(thread, max_tokens=5000, logit_bias={1: -1e4})
        long.until(Token)
        other = Waiting(thread, names=ModelNames("tiny:mamba2"), max_tokens=2)
        other.opened.cancel()
        assert (other.record.outcome, long.opened.is_over) == ("cancelled", False)


def test_a_prompt_that_is_being_made_does_not_keep_the_thread_from_stopping(slow) -> None:
    with running() as thread:
        waiting = Waiting(thread, prompt="slow")
        thread.stop(0)
        assert waiting.record.outcome == "cancelled"
        assert not slow.is_set()


def test_tokens_are_counted_beside_the_thread(shared, slow) -> None:
    async def count() -> int:
        counting = asyncio.ensure_future(shared.count_tokens(Request(ModelNames(), 1, prompt="slow")))
        await asyncio.to_thread(Waiting(shared, max_tokens=2).end)
        assert not counting.done()
        slow.set()
        return await counting

    assert asyncio.run(count()) == len("slow")


def test_what_runs_may_end_before_the_thread_stops(tiny: LoadedModel) -> None:
    with running() as thread:
        asked = [Waiting(thread, prompt=prompt) for prompt in PROMPTS[:3]]
        asked[0].until(Token)
        thread.stop(600)
        assert [waiting.tokens for waiting in asked] == [alone(tiny, prompt)[0] for prompt in PROMPTS[:3]]
        assert not thread.is_healthy
        with pytest.raises(ApiError, match="stopping") as refused:
            Waiting(thread)
        assert refused.value.status == 503
        with pytest.raises(ApiError, match="stopping"):
            thread.call(lambda _: None)


def test_a_second_stop_shortens_the_time() -> None:
    with running() as thread:
        waiting = Waiting(thread, max_tokens=2000, logit_bias={1: -1e4})
        waiting.until(Token)
        first = threading.Thread(target=thread.stop, args=(600,))
        first.start()
        while thread.is_healthy:
            time.sleep(0.001)
        thread.stop(0)
        first.join()
        assert waiting.record.outcome == "cancelled"


@pytest.mark.parametrize(
    ("asked", "status", "found"),
    [
        ({"prompt": ""}, 400, "the prompt has no tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type 'image_url' is not"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": 1}}, 400, "tokenize is not an argument"),
        ({"prompt": "x" * 40_000}, 400, "maximum context length is 32768 tokens. However, your mess"),
        ({"temperature": 1.0, "top_k": 256}, 400, "top_k is 256; wanted less than 256, the size of the vocabulary."),
        ({"logit_bias": {256: 1.0}}, 400, "logit_bias names token 256; wanted 0 to 255."),
        ({"names": ModelNames("./nothing")}, 404, "model './nothing': no such folder."),
        ({"names": ModelNames(draft="tiny:nothing")}, 404, "model tiny:nothing: no such kind."),
    ],
)
def test_what_cannot_be_answered_fails_with_a_reason_and_nobody_else_does(tiny, shared, asked, status, found):
    good, bad = Waiting(shared, prompt=PROMPTS[0]), Waiting(shared, **asked)
    assert bad.failure.status == status
    assert found in bad.failure.message
    assert "\n" not in bad.failure.message
    assert bad.failure.record is not None
    assert bad.failure.record.outcome == "error"
    assert good.tokens == alone(tiny, PROMPTS[0])[0]


def test_a_request_beyond_its_limit_fails_with_both_sizes_and_the_next_one_is_answered() -> None:
    with running(max_request_bytes=600_000) as thread:
        Waiting(thread, prompt="short").end()
        bad = Waiting(thread, prompt=LONG).failure
        assert bad.status == 400
        assert bad.message.endswith("bytes while they run; --max-request-bytes allows 600000.")
        assert bad.code == "context_length_exceeded"
        assert str(bad.anthropic_message).startswith("prompt is too long: ")
        assert Waiting(thread, prompt="short").record.completion_tokens > 0


def test_a_reply_without_a_limit_goes_on_to_the_end_of_the_context_and_reserves_no_room_for_all_of_it(monkeypatch):
    context_length = 300
    monkeypatch.setattr("runner.models.load._context_length", lambda config: context_length)
    with running() as thread:
        free = Waiting(thread, max_tokens=None, logit_bias={1: -1e4})
        beyond = Waiting(thread, max_tokens=5000, logit_bias={1: -1e4})
        short = Waiting(thread, max_tokens=3)
        assert short.record.completion_tokens == 3
        for each in (free, beyond):
            record = each.record
            assert (record.outcome, record.prompt_tokens + record.completion_tokens) == ("length", context_length)
        full = Waiting(thread, prompt="x" * context_length, max_tokens=None)
        assert full.record.completion_tokens == 1
        error = Waiting(thread, prompt="x" * (context_length + 1)).failure
    assert error.in_openai_form()["error"] == {
        "message": "This model's maximum context length is 300 tokens. However, your messages resulted in 301 tokens. "
        "Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    anthropic = {"type": "invalid_request_error", "message": "prompt is too long: 301 tokens > 300 maximum"}
    assert error.in_anthropic_form() == {"type": "error", "error": anthropic}


def test_a_reply_that_the_memory_cannot_hold_ends_with_what_it_has() -> None:
    with running(max_request_bytes=600_000) as thread:
        waiting = Waiting(thread, max_tokens=4000, logit_bias={1: -1e4})
        assert waiting.record.outcome == "length"
        assert 10 < waiting.record.completion_tokens < 4000
        assert "max_request_bytes is 600000" in str(waiting.record.note)


def test_what_is_raised_for_one_ends_that_one(tiny, monkeypatch, either):
    def likeliest(*_: Any) -> tuple[()]:
        raise RuntimeError("so many?")

    monkeypatch.setattr(served_model, "likeliest", likeliest)
    good, bad = Waiting(either, prompt=PROMPTS[0]), Waiting(either, top_logprobs=5)
    assert (bad.failure.status, str(bad.failure)) == (500, "RuntimeError: so many?")
    assert good.tokens == alone(tiny, PROMPTS[0])[0]
    assert Waiting(either, prompt=PROMPTS[0]).tokens == good.tokens


def test_a_round_that_fails_ends_those_that_ran_and_the_next_request_is_answered(tiny, monkeypatch):
    served = ParallelGenerator.round
    failures = [RuntimeError("a bug")]

    def round_(self: ParallelGenerator) -> Any:
        if failures:
            raise failures.pop()
        return served(self)

    monkeypatch.setattr(ParallelGenerator, "round", round_)
    with running() as thread:
        assert Waiting(thread).failure.message == "RuntimeError: a bug"
        assert Waiting(thread, prompt=PROMPTS[0]).tokens == alone(tiny, PROMPTS[0])[0]


def test_when_the_thread_dies_everyone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()

    def round_(self: ServedModel) -> None:
        if not self.is_idle:
            died.wait()
            raise SystemExit("out of everything")

    monkeypatch.setattr(ServedModel, "round", round_)
    with running() as thread:
        asked = [Waiting(thread), Waiting(thread)]
        called = thread.call(lambda _: 1)
        died.set()
        assert [waiting.failure.status for waiting in asked] == [503, 503]
        if (error := called.exception()) is not None:  # it came behind the last round
            assert isinstance(error, ApiError)
        thread.stop(0)
        assert not thread.is_healthy
        with pytest.raises(ApiError) as refused:
            Waiting(thread)
        assert refused.value.status == 503


def test_who_comes_when_all_places_are_taken_is_turned_away_and_the_others_are_served() -> None:
    with running(decode_concurrency=1, max_waiting=2) as thread:
        held = threading.Event()
        thread.call(lambda _: held.wait())
        asked = [Waiting(thread, max_tokens=2) for _ in range(3)]
        assert thread.waiting == 3
        with pytest.raises(ApiError, match="3 requests run or wait") as refused:
            Waiting(thread)
        assert refused.value.status == 429
        assert refused.value.retry_after_s is not None
        held.set()
        assert all(waiting.record.completion_tokens for waiting in asked)
        Waiting(thread).end()


def test_a_call_runs_on_the_thread_and_what_it_raises_is_the_callers(shared: Scheduler) -> None:
    assert shared.call(lambda _: threading.current_thread().name).result() == "generation"
    with pytest.raises(ZeroDivisionError):
        shared.call(lambda _: 1 // 0).result()
    assert Waiting(shared).record.completion_tokens > 0


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"context": 100, "model": "tiny:llama4"}, "its layers cannot be shared"),
        ({"kv_bits": 8, "quantized_kv_start": 5000}, "--quantized-kv-start is 5000; wanted 0"),
        ({"stored_bits": 8, "exact": True}, "--stored-bits rounds stored state"),
        ({"decode_concurrency": 0}, "max_rows is 0"),
    ],
)
def test_what_cannot_be_is_said_at_start(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found), running(**options):
        pass


def test_tokens_that_are_counted_when_the_thread_stops_are_refused(slow) -> None:
    async def count(thread: Scheduler) -> None:
        busy = [asyncio.ensure_future(thread.count_tokens(Request(ModelNames(), 1, prompt="slow"))) for _ in range(4)]
        await asyncio.to_thread(thread.call(lambda models: None).result)
        await asyncio.to_thread(thread.stop, 0)
        slow.set()
        found = await asyncio.gather(*busy, return_exceptions=True)
        assert {each.status for each in found if isinstance(each, ApiError)} == {503}, found
        assert not any(isinstance(each, asyncio.CancelledError) for each in found)

    with running() as thread:
        asyncio.run(count(thread))
