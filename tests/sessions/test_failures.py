"""Sessions that go wrong: afterwards the tree is sound, what was completed is reused, and the next answers are right.

A fuse in a middle layer of a tiny model blows at a chosen forward pass: it raises, or it spoils the layer's output so
that its evaluation fails. Our own copies fail at every call in turn. Generators run ahead of what they report, and are
closed early. Ctrl-C comes from a real signal at many lines.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache, Session, SessionClosedError, stream_generate
from radixcache.adapters.contract import Spans
from radixcache.layers.layout import LiveStateError
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import VOCABULARY_LENGTH, tiny_tokenizer
from tests import inside
from tests.groups.cold import ROUNDING, cold, error, serve, shared_model
from tests.sessions.faults import (
    FailingCopies,
    Fuse,
    LineInterrupt,
    failed_decomposition,
    fused,
    interruptible,
    raising,
    refused_product,
    spoiling,
)

#: Of the requests that something happens to, and of those before and after them.
STEP_SIZE, WHOLE = 16, 64
#: The deepest checkpoint before the end of a prompt that is taken in any case.
TAIL_LENGTH = 16

KINDS = ["llama", "llama_sliding", "nemotron_h"]
#: A single-token write into these goes over what it replaces, so only a checkpoint brings it back.
OVERWRITING_KINDS = {"llama_sliding"}

_random = np.random.default_rng(11)
SYSTEM = _random.integers(0, VOCABULARY_LENGTH, 20).tolist()
PROMPT = [*SYSTEM, 1, *_random.integers(0, VOCABULARY_LENGTH, 40).tolist()]
OTHER = [*SYSTEM, 2, *_random.integers(0, VOCABULARY_LENGTH, 30).tolist()]
REPLY = _random.integers(0, VOCABULARY_LENGTH, 5).tolist()
TURN = [*PROMPT, *REPLY, 7, 8, 9]
PROMPT_END = mx.array(PROMPT[-1:])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    return shared_model(kind)


def warm(model: Any, **more: Any) -> PrefixCache:
    """A cache that holds another user's conversation, paged out."""
    cache = PrefixCache(model, **more)
    feed(cache, model, OTHER, step_size=WHOLE)
    feed(cache, model, [0, 3, 5])
    return cache


def feed(
    cache: PrefixCache, model: Any, prompt: list[int], reply: Sequence[int] = (), step_size: int = STEP_SIZE
) -> None:
    with cache.begin(prompt, reserve=32) as session:
        run(session, model, reply, step_size)


def run(session: Session, model: Any, reply: Sequence[int], step_size: int = STEP_SIZE) -> None:
    """Prefill, then step through the reply, and look at each step."""
    session.prefill(model, step_size=step_size)
    for token in (int(session.prompt[-1]), *reply):
        mx.eval(session.step(model, [token]))


@pytest.fixture(scope="module")
def passes(model: Any) -> list[int]:
    """Every third forward pass of PROMPT and REPLY on a warm cache, and the last."""
    cache = warm(model)
    with fused(model, Fuse()) as fuse:
        feed(cache, model, PROMPT, REPLY)
    return [*range(1, fuse.passes, 3), fuse.passes]


def test_after_a_layer_raised_at_a_forward_pass_the_rest_is_kept_and_the_retry_is_right(
    kind: str, model: Any, passes: list[int]
) -> None:
    for at in passes:
        cache = warm(model)
        session = cache.begin(PROMPT, reserve=32)
        blown = Fuse(at, raising(KeyboardInterrupt, after=True))
        with fused(model, blown) as fuse, pytest.raises(KeyboardInterrupt, match="blown"), session:
            run(session, model, REPLY)
        completed = session.cached_tokens + fuse.done
        cache.check()
        retry = serve(cache, model, TURN)
        # Nothing of the pass that broke off is there, and all that came before it.
        assert retry.matched_tokens <= max(completed, len(SYSTEM)), at
        in_decode = completed >= len(PROMPT) - 1
        kept = len(PROMPT) - TAIL_LENGTH if in_decode and kind in OVERWRITING_KINDS else completed
        assert retry.cached_tokens >= kept, (at, completed)
        assert serve(cache, model, OTHER).cached_tokens > 0


def test_a_session_that_caught_the_error_of_its_model_goes_on_rightly(model: Any, passes: list[int]) -> None:
    for at in passes:
        cache = warm(model)
        with cache.begin(PROMPT, reserve=32) as session:
            with fused(model, Fuse(at, raising(RuntimeError, after=True))), pytest.raises(RuntimeError, match="blown"):
                run(session, model, REPLY)
            following = [*PROMPT, *REPLY][session.position :]
            if session.position < len(PROMPT) - 1:
                session.prefill(model, step_size=STEP_SIZE)
                following = [*PROMPT, *REPLY][session.position :]
            for token in following:
                logits = session.step(model, [token])
            assert error(logits[0, -1], cold(model, [*PROMPT, *REPLY])) < ROUNDING, at
        cache.check()
        assert serve(cache, model, TURN).cached_tokens == len(PROMPT) + len(REPLY)


def test_of_a_pass_that_broke_off_in_a_loop_of_the_callers_own_nothing_is_stored() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model)
    with cache.begin(PROMPT) as session:
        session.prefill(model)
        with fused(model, Fuse(1, raising(ValueError, after=True))), pytest.raises(ValueError, match="blown"):
            model(mx.array([PROMPT[-1:]]), cache=session.caches)
    cache.check()
    assert cache.stats.tokens == len(PROMPT) - 1


def test_after_an_evaluation_failed_at_a_forward_pass_no_wrong_state_is_stored_also_where_nobody_looked_at_it(
    model: Any, passes: list[int]
) -> None:
    for at in passes:
        cache = warm(model)
        session = cache.begin(PROMPT, reserve=32)
        with fused(model, Fuse(at, spoiling(refused_product))), pytest.raises(RuntimeError), session:
            run(session, model, REPLY)
        cache.check()
        # The paged state of others is not touched by it.
        assert serve(cache, model, [*OTHER, 9]).cached_tokens == len(OTHER)
        serve(cache, model, TURN)
    # A step that nobody looked at is found at close.
    cache = warm(model)
    with fused(model, Fuse(1, spoiling(refused_product))), cache.begin(PROMPT[:1]) as session:
        session.step(model, PROMPT[:1])
    cache.check()
    serve(cache, model, TURN)
    assert serve(cache, model, [*OTHER, 9]).cached_tokens == len(OTHER)


@pytest.mark.parametrize("poison", [refused_product, pytest.param(failed_decomposition, marks=pytest.mark.own_process)])
def test_a_session_whose_state_was_lost_says_so_and_closes(poison: Callable[[], mx.array]) -> None:
    llama = shared_model("llama")
    cache = warm(llama)
    session = cache.begin(PROMPT)
    with fused(llama, Fuse(2, spoiling(poison))), pytest.raises(RuntimeError):
        session.prefill(llama, step_size=STEP_SIZE)
    if session.is_lost:
        with pytest.raises(SessionClosedError, match="state was lost"):
            session.prefill(llama)
        with pytest.raises(SessionClosedError, match="state was lost"):
            session.step(llama, PROMPT[:1])
    else:
        run(session, llama, REPLY)
    session.close()
    cache.check()
    serve(cache, llama, TURN)


def test_a_sampled_token_that_cannot_be_evaluated_is_not_stored(model: Any) -> None:
    cache = warm(model)
    with cache.begin(PROMPT, reserve=32) as session:
        session.prefill(model, step_size=STEP_SIZE)
        session.step(model, PROMPT[-1:])
        session.step(model, mx.zeros((1,), mx.int32) + refused_product().astype(mx.int32))
    cache.check()
    assert serve(cache, model, [*PROMPT, 0, 1]).matched_tokens <= len(PROMPT)


#: How often each copy fails in a row: once, and it is made again; or twice, and the call raises.
COPIES = {"page_out": 1, "page_in": 2, "checkpoint": 2, "restore_points": 1, "reserve": 2, "split": 1, "merge": 2}
#: Kind, live slots, which calls fail (the first, and from there every so many), the copy, and how often in a row.
COPYING = [
    *(("nemotron_h", 1, 8, *each) for each in COPIES.items()),
    *(pytest.param("llama_sliding", 1, 7, *each, marks=pytest.mark.slow) for each in COPIES.items()),
    *(("llama", 2, 9, *each) for each in (("page_out", 2), ("copy", 2), ("page_in", 1), ("reserve", 2))),
]


def _timeline(cache: PrefixCache, model: Any) -> Iterator[Callable[[], Any]]:
    """Operations that between them make every copy: switches, branches, marks, inserts, fetches, reclaims."""
    yield lambda: feed(cache, model, PROMPT, REPLY, step_size=WHOLE)
    yield lambda: feed(cache, model, OTHER, REPLY, step_size=WHOLE)
    yield lambda: feed(cache, model, [*PROMPT, *REPLY, 9], step_size=WHOLE)
    yield lambda: feed(cache, model, [*PROMPT[:40], 9, 9, 9], step_size=WHOLE)
    if len(inside.paths(cache)) > 1:
        yield lambda: _side_by_side(cache, model, [*PROMPT, 5], OTHER)
        yield lambda: cache.reclaim(cache.stats.live_bytes * 2 // 3)
        yield lambda: _side_by_side(cache, model, [*OTHER, 6], [*SYSTEM, 3, 4, 5])
    yield lambda: cache.fetch([*OTHER, 9])
    yield lambda: cache.insert([8, *PROMPT], _filled(model, [8, *PROMPT]))
    yield lambda: feed(cache, model, [*OTHER, *REPLY, 9], step_size=WHOLE)
    yield lambda: feed(cache, model, [*PROMPT[:30], 6, 6, 6], step_size=WHOLE)
    yield lambda: feed(cache, model, [*OTHER, *REPLY, 9, 9], step_size=WHOLE)
    yield lambda: cache.reclaim(cache.stats.live_bytes + cache.stats.paged_bytes * 2 // 3)
    yield lambda: cache.reclaim(cache.stats.live_bytes // 2)
    yield lambda: feed(cache, model, [*PROMPT, *REPLY, 9, 10], step_size=WHOLE)


def _side_by_side(cache: PrefixCache, model: Any, first: list[int], second: list[int]) -> None:
    with cache.begin(first, marks=[len(SYSTEM)]) as one:
        run(one, model, (), WHOLE)
        with cache.begin(second, marks=[len(SYSTEM)]) as other:
            run(other, model, (), WHOLE)
            mx.eval(one.step(model, [7]))


def _filled(model: Any, prompt: list[int]) -> list[Any]:
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=caches))
    return list(caches)


@pytest.mark.parametrize(("kind", "slots", "stride", "method", "times"), COPYING)
def test_a_copy_that_fails_once_is_made_again_and_one_that_keeps_failing_leaves_nothing_wrong(
    kind: str, slots: int, stride: int, method: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = shared_model(kind)
    error = RuntimeError if times == 1 else MemoryError
    at = 1
    reached = True
    while reached:
        cache = PrefixCache(model, live_slots=slots)
        with FailingCopies(method, at, times, error).installed(monkeypatch) as failing:
            for operation in _timeline(cache, model):
                try:
                    operation()
                except (error, LiveStateError):
                    assert times > 1
                    assert failing.reached
                cache.check()
        assert not any(path.is_open for path in inside.paths(cache))
        for prompt in ([*OTHER, 9], TURN):
            serve(cache, model, prompt)
        reached = failing.reached
        assert reached or at > 1
        at += stride


def test_a_copy_that_memory_runs_out_for_is_made_once_half_of_what_is_held_has_gone() -> None:
    class Full(SizedLayout):
        most_bytes = 1 << 30

        def page_out(self, caches: Sequence[Any], start: int, end: int) -> Spans:
            if cache.stats.paged_bytes > self.most_bytes:
                raise MemoryError("[malloc] Unable to allocate 4096 bytes.")
            return super().page_out(caches, start, end)

    layout = Full(1)
    cache = sized_cache(layout, budget_bytes=1 << 20)
    for first in range(0, 10_000, 1000):
        if first == 9000:
            layout.most_bytes = 500
        with cache.begin(list(range(first, first + 100))) as session:
            session.prefill(SizedModel())
    assert cache.stats.evictions > 0
    assert cache.stats.paged_bytes <= 500
    cache.check()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def test_tokens_that_were_not_reported_are_not_stored(kind: str, model: Any) -> None:
    cache = warm(model)
    with cache.begin(PROMPT, reserve=32) as session:
        session.prefill(model, step_size=STEP_SIZE)
        generator = generate_step(PROMPT_END, model, prompt_cache=session.caches, max_tokens=8)
        reply = [int(token) for token, _ in generator]
        session.extend(reply[:3])
    cache.check()
    retry = serve(cache, model, [*PROMPT, *reply, 7, 8])
    assert retry.matched_tokens <= len(PROMPT) + 3
    assert retry.cached_tokens >= (len(PROMPT) + 3 if kind == "llama" else len(PROMPT) - TAIL_LENGTH)


def test_a_loop_of_its_own_that_reports_wrong_tokens_too_late_is_told(model: Any) -> None:
    cache = warm(model)
    with cache.begin(PROMPT, reserve=32) as session:
        session.prefill(model, step_size=STEP_SIZE)
        offset = inside.layout(cache).first_offset(session.caches)
        model(mx.array([[*PROMPT[-1:], 4, 5]]), cache=session.caches)
        if offset is not None:
            with pytest.raises(ValueError, match=f"{len(PROMPT) + 2}.*only {len(PROMPT)} tokens are known"):
                session.step(model, [6])
    cache.check()
    serve(cache, model, [*PROMPT, 4, 5, 6])


@pytest.mark.parametrize("start", [0, len(PROMPT) + 2])
def test_caches_that_were_quantized_on_the_way_are_stored_up_to_there(start: int) -> None:
    llama = shared_model("llama")
    cache = warm(llama)
    reply = []
    with cache.begin(PROMPT, reserve=32) as session:
        session.prefill(llama, step_size=STEP_SIZE)
        bits: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": start}
        for token, _ in generate_step(PROMPT_END, llama, prompt_cache=session.caches, max_tokens=8, **bits):
            reply.append(int(token))
            session.extend([int(token)])
    del session
    gc.collect()
    cache.check()
    retry = serve(cache, llama, [*PROMPT, *reply, 7, 8])
    # mlx-lm converts after the forward pass that reaches the start.
    stored = max(len(PROMPT), min(start, len(PROMPT) + 8))
    assert retry.cached_tokens == stored
    assert retry.matched_tokens == stored


def _conversation(cache: PrefixCache, model: Any, tokenizer: Any) -> None:
    """A run of requests of every sort."""
    feed(cache, model, PROMPT, REPLY)
    feed(cache, model, OTHER, REPLY)
    for _ in stream_generate(model, tokenizer, [*PROMPT, *REPLY, 4], max_tokens=3, cache=cache):
        pass
    cache.fetch([*OTHER, *REPLY])
    cache.insert([5, *OTHER], _filled(model, [5, *OTHER]))
    cache.reclaim(50_000)
    feed(cache, model, [*PROMPT[:30], 1, 2, 3])
    feed(cache, model, [*PROMPT[:30], 4, 5, 6])


def _interrupted_at(line: int, model: Any, tokenizer: Any) -> int:
    """Run the conversation with an interrupt at one line; check what is left; returns how many lines were reached."""
    cache = PrefixCache(model)
    with interruptible(), LineInterrupt(line).installed() as lines, suppress(KeyboardInterrupt):
        _conversation(cache, model, tokenizer)
    gc.collect()
    cache.check()
    serve(cache, model, TURN)
    serve(cache, model, [*OTHER, 9])
    return lines.lines


def test_after_an_interrupt_at_any_of_many_lines_the_cache_is_sound_and_right(tokenizer: Any) -> None:
    model = shared_model("llama")
    total = _interrupted_at(0, model, tokenizer)
    for line in range(1, total, total // 5):
        assert _interrupted_at(line, model, tokenizer) >= line


def test_a_session_whose_finalizer_was_cut_off_frees_the_slot_for_the_next(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = warm(model)
    monkeypatch.setattr(Session, "__del__", lambda self: None)
    session = cache.begin(PROMPT)
    session.prefill(model)
    del session
    gc.collect()
    serve(cache, model, TURN)
    assert serve(cache, model, [*OTHER, 9]).cached_tokens > 0
