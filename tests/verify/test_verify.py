"""verify=1.0 finds spoilt state, quarantines it and answers cold; where nothing is wrong it changes nothing."""

from __future__ import annotations

import gc
import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate as plain_stream_generate
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from numpy.typing import NDArray

from radixcache import Event, EventKind, PrefixCache, Reason, Session, stream_generate
from radixcache.layers.sizes import SizedLayout
from radixcache.sized_cache import sized_cache
from radixcache.verify import Part
from runner.models.tiny import VOCABULARY_LENGTH, tiny_model, tiny_tokenizer
from tests import inside
from tests.groups.cold import shared_model
from tests.sessions.faults import LineInterrupt, interruptible
from tests.verify.faults import (
    PROMPT_A,
    PROMPT_B,
    STEP_SIZE,
    SYSTEM,
    TAIL_B,
    TURN,
    Hidden,
    answer,
    cold,
    far_apart,
    fault,
    same_bits,
    serve,
    spoil_live,
)

__all__ = ["fault"]  # a fixture


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning:radixcache")


def test_a_planted_fault_is_found_quarantined_and_answered_cold(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, make, parts, expected = fault
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    blind = make()
    with blind.begin(prompt) as session:
        assert session.cached_tokens > 0
        unnoticed = answer(session, model)
    assert far_apart(unnoticed, expected)

    told: list[Event] = []
    cache = make(verify=1.0, on_event=told.append)
    warned = pytest.warns(RuntimeWarning, match="differs from a cold prefill")
    with cache.begin(prompt) as session:
        resumed = session.cached_tokens
        assert resumed > 0
        with warned:
            found = answer(session, model)
        assert session.cached_tokens == 0
        cache.check()
    assert same_bits(found, expected)
    cache.check()
    (mismatch,) = cache.mismatches
    assert mismatch is session.mismatch
    assert (mismatch.tokens.tolist(), mismatch.resume_offset) == (prompt, resumed)
    assert mismatch.part in parts
    assert not mismatch.error <= mismatch.tolerance
    stats = cache.stats
    assert (stats.verify_mismatches, stats.quarantined, stats.verify_bytes) == (1, 1, 0)
    assert stats.verify_largest_error >= mismatch.error
    monkeypatch.undo()
    # Nothing of it is stored any more, nor resumed: begin, fetch and insert all stop in front of it.
    start = mismatch.quarantined_from
    (event,) = [event for event in told if event.kind == EventKind.QUARANTINED]
    assert (event.start, event.end, event.detail["mismatch"]) == (start, resumed, mismatch)
    explained = cache.explain(prompt)
    assert explained.matched_tokens <= start
    assert (explained.gaps[-1].reason, explained.gaps[-1].start) == (Reason.QUARANTINED, start)
    assert inside.quarantined_from(cache, prompt) == start < resumed
    caches, remaining = cache.fetch(prompt)
    assert len(prompt) - len(remaining) <= start
    model(mx.array([remaining.tolist()]), cache=caches)
    assert cache.insert(prompt, caches) <= start
    with cache.begin([*prompt, 5]) as session:
        assert session.matched_tokens <= start
        assert session.mismatch is None
        answer(session, model)
    # Once the quarantine is cleared, the path is stored again.
    cache.clear_quarantine("elsewhere")
    assert cache.stats.quarantined == 1
    cache.clear_quarantine()
    assert cache.stats.quarantined == 0
    serve(cache, model, prompt)
    with cache.begin([*prompt, 0, 1, 2, 9]) as session:
        assert session.cached_tokens >= len(prompt) - 16
        answer(session, model)
        assert session.mismatch is None
    cache.check()
    assert cache.stats.verify_mismatches == 1


def test_a_session_that_stands_on_wrong_state_stores_none_of_it_also_where_that_is_not_quarantined_any_more() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0, live_slots=2)
    serve(cache, model, PROMPT_A)
    spoil_live(cache, 0, 20)
    standing = cache.begin([*PROMPT_A, 1])
    with pytest.warns(RuntimeWarning, match="from token 20 on"):
        serve(cache, model, [*PROMPT_A, 3])
    cache.clear_quarantine()
    standing.close()
    cache.check()
    explained = cache.explain(PROMPT_A)
    assert explained.matched_tokens == 20
    assert {gap.reason for gap in explained.gaps} == {Reason.QUARANTINED}
    assert "found wrong by verify and removed at tick 3" in str(explained)
    # The slot is as good as any other afterwards.
    with cache.begin([*PROMPT_A, 1, 3]) as session:
        assert session.cached_tokens == 20
        session.prefill(model)
        assert session.mismatch is None
    assert cache.explain([*PROMPT_A, 1]).matched_tokens == len(PROMPT_A) + 1


def test_what_is_wrong_is_quarantined_from_the_first_row_that_is_in_any_layer() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    spoil_live(cache, 0, 30, layer=0)
    spoil_live(cache, 0, 20)
    with pytest.warns(RuntimeWarning, match="from token 20 on"):
        serve(cache, model, [*PROMPT_A, 3])
    (mismatch,) = cache.mismatches
    assert (mismatch.layer, mismatch.row, mismatch.quarantined_from) == (0, 20, 20)


def test_pins_on_the_wrong_path_are_void_and_those_in_front_of_it_stay() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    cache.pin(PROMPT_A[:10])
    cache.pin(PROMPT_A)
    spoil_live(cache, 0, 20)
    with pytest.warns(RuntimeWarning, match="from token 20 on"):
        serve(cache, model, [*PROMPT_A, 3])
    assert cache.stats.pinned_bytes == 10 * inside.layout(cache).token_bytes
    cache.unpin(PROMPT_A[:10])
    with pytest.raises(ValueError, match="not pinned"):
        cache.unpin(PROMPT_A)
    with pytest.raises(ValueError, match="only 20 of 70 tokens are stored"):
        cache.pin(PROMPT_A)
    # The walls of a namespace: the same prompt elsewhere is nobody's business.
    serve(cache, model, PROMPT_A, namespace="tenant")
    assert cache.begin([*PROMPT_A, 1], namespace="tenant").cached_tokens == len(PROMPT_A)


def long_prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, VOCABULARY_LENGTH, n).tolist() for n in lengths]


def steps(session: Session, model: Any) -> list[NDArray[Any]]:
    """What answer() gives, without prefill()."""
    logits = [session.step(model, session.remaining), *(session.step(model, [token]) for token in range(3))]
    return [np.array(logits[0][:, -1:]), *map(np.array, logits[1:])]


@pytest.mark.parametrize(("kind", "takes"), [("llama", "steps"), ("nemotron_h", "prefill")])
def test_where_only_the_logits_differ_the_whole_path_is_quarantined(kind: str, takes: str) -> None:
    model = Hidden(shared_model(kind))
    cache = PrefixCache(model.model, verify=1.0)
    serve(cache, model, PROMPT_A)
    serve(cache, model, PROMPT_B)
    prompt = [*PROMPT_A, 0, 1, 2, *TAIL_B]
    with cache.begin(prompt) as session:
        ours = id(session.caches[0])
        model.wrong = lambda live: id(live[0]) == ours and session.mismatch is None
        with pytest.warns(RuntimeWarning, match="the logits, relative error"):
            found = answer(session, model) if takes == "prefill" else steps(session, model)
        cache.check()
        offsets = [checkpoint.offset for checkpoint in inside.checkpoints(session)]
        assert len(offsets) == len(set(offsets))
    cache.check()
    assert session.mismatch is not None
    assert (session.mismatch.part, session.mismatch.quarantined_from) == (Part.LOGITS, 0)
    if takes == "prefill":
        assert same_bits(found, cold(model.model, prompt))
    else:
        assert not far_apart(found, cold(model.model, prompt))
    with cache.begin([*prompt, 1]) as session:
        assert session.matched_tokens == 0
    _, remaining = cache.fetch(prompt)
    assert remaining.tolist() == prompt
    # What others share with it is theirs.
    with cache.begin([*PROMPT_B, 9]) as session:
        assert session.matched_tokens == len(PROMPT_B)


# When nothing is wrong


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("fault", ["state", "logits"])
def test_where_warnings_are_errors_the_request_can_go_on_after_it(fault: str) -> None:
    model = Hidden(shared_model("llama"))
    cache = PrefixCache(model.model, verify=1.0)
    serve(cache, model, PROMPT_A)
    if fault == "state":
        spoil_live(cache, 0, 20)
    with cache.begin([*PROMPT_A, 9, 8]) as session:
        ours = id(session.caches[0])
        model.wrong = lambda live: fault == "logits" and id(live[0]) == ours and session.mismatch is None
        left = session.remaining
        with pytest.raises(RuntimeWarning, match="cold prefill"):
            session.step(model, left)
        cache.check()
        logits = session.step(model, left)
        assert not far_apart([np.array(logits[:, -1:])], cold(model.model, [*PROMPT_A, 9, 8])[:1])
    cache.check()


def test_a_check_leaves_no_handle_on_the_live_buffers_behind() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    (prompt,) = long_prompts(600)
    with cache.begin(prompt, reserve=64) as session:
        session.prefill(model)
    with cache.begin(prompt, reserve=64) as session:
        session.prefill(model)
        gc.collect()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(session.step(model, prompt[-1:]))
        # A buffer that somebody holds is copied when it is written.
        assert mx.get_peak_memory() - before < session.caches[0].keys.nbytes
    assert cache.stats.verified_requests == 1


def test_without_verify_nothing_is_evaluated_twice_and_with_it_everything_once_more() -> None:
    model = Hidden(shared_model("llama"))
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    counts = {}
    for share in (0.0, 1.0):
        cache = PrefixCache(model.model, verify=share)
        serve(cache, model, PROMPT_A)
        model.passes.clear()
        serve(cache, model, prompt)
        counts[share] = sum(model.passes)
        assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (int(share), 0)
    assert counts[0.0] == len(TURN) + 3
    assert counts[1.0] == counts[0.0] + len(prompt)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_fetch_and_begin_many_restore_is_drawn_as_well_and_counted_as_skipped(share: float) -> None:
    model = shared_model("llama")
    drawn = random.Random(7)
    cache = PrefixCache(model, verify=share, verify_seed=7)
    prompt = list(range(40))
    cache.fetch(prompt)  # nothing is restored, nothing is drawn
    with cache.begin(prompt) as session:
        session.prefill(model)
    wanted_skipped = wanted_verified = 0
    for turn in range(12):
        is_drawn = drawn.random() < share
        if turn % 3 == 0:
            with cache.begin(prompt) as session:
                session.prefill(model)
            wanted_verified += is_drawn
        elif turn % 3 == 1:
            cache.fetch(prompt)
            wanted_skipped += is_drawn
        else:
            with cache.begin_many([prompt], capacity=64) as group:
                assert group.rows[0].cached_tokens == 39
            wanted_skipped += is_drawn
        stats = cache.stats
        assert (stats.verified_requests, stats.verify_skipped) == (wanted_verified, wanted_skipped)
    assert (wanted_skipped + wanted_verified > 0) == (share > 0)


@pytest.mark.parametrize("kind", ["llama_sliding", "nemotron_h"])
def test_answers_are_the_same_bits_with_and_without_verification(kind: str) -> None:
    model = shared_model(kind)
    plain, verified = PrefixCache(model), PrefixCache(model, verify=1.0)
    for prompt in (PROMPT_A, [*PROMPT_A, *TURN], PROMPT_B, [*PROMPT_B, 0, 1, *TURN], PROMPT_A):
        assert same_bits(serve(plain, model, prompt), serve(verified, model, prompt))
    assert verified.dump() == plain.dump()
    stats = verified.stats
    assert stats.verified_requests >= 2
    assert stats.verify_largest_error < 1e-5
    assert stats.verify_largest_error > 0
    assert (stats.verify_mismatches, stats.verify_skipped, verified.mismatches) == (0, 0, ())


# When a check cannot be made


@pytest.mark.parametrize(("budget_tokens", "fits"), [(1_100, False), (1_700, True)])
def test_a_second_state_makes_room_for_itself_or_is_skipped_and_evicts_nothing(budget_tokens: int, fits: bool) -> None:
    model = shared_model("llama")
    probe = PrefixCache(model)
    serve(probe, model, SYSTEM)
    token_bytes = inside.layout(probe).token_bytes
    cache = PrefixCache(model, verify=1.0, budget_bytes=budget_tokens * token_bytes)
    second, third, first = long_prompts(210, 220, 620)
    watched = Hidden(model, cache)
    for prompt in (second, third, first):
        with cache.begin(prompt, reserve=8) as session:
            session.prefill(watched)
    before = cache.stats
    assert before.evictions == 0
    assert max(watched.held) == 0
    with cache.begin([*first, 1, 2], reserve=8) as session:
        session.prefill(watched, step_size=256)
        cache.check()
    cache.check()
    stats = cache.stats
    assert (stats.verified_requests, stats.verify_skipped) == (int(fits), int(not fits))
    assert (stats.evictions > 0) == fits
    assert (max(watched.held) >= len(first) * token_bytes) == fits
    assert stats.verify_bytes == 0
    assert stats.peak_bytes <= budget_tokens * token_bytes


def test_what_the_tokens_do_not_tell_is_skipped() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    for _ in range(2):  # Keys that are not the token ids.
        serve(cache, model, PROMPT_A, keys=np.array(PROMPT_A) + 1000)
    assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (0, 1)
    serve(cache, model, PROMPT_A)
    with cache.begin([*PROMPT_A, 0, 1, 2, *TURN]) as session:  # The loop called the model before prefill.
        at = session.cached_tokens
        model(mx.array(session.prompt[at : at + 4])[None], cache=session.caches)
        session.prefill(model)
    assert (cache.stats.verified_requests, cache.stats.verify_skipped) == (0, 2)
    caches = lambda: [RotatingKVCache(max_size=60, keep=4) for _ in model.layers]  # noqa: E731
    cache = PrefixCache(model, caches=caches, verify=1.0)  # Windows that have wrapped and keep their first tokens.
    for prompt in (SYSTEM, [*SYSTEM, 0, 1, 2, 5], PROMPT_A, [*PROMPT_A, 0, 1, 2, 5]):
        serve(cache, model, prompt)
    assert (cache.stats.verified_requests, cache.stats.verify_skipped, cache.stats.verify_mismatches) == (1, 2, 0)
    for share in (-0.1, 1.1, float("nan"), True, "1", None):
        with pytest.raises(ValueError, match="wanted a share from 0 to 1"):
            PrefixCache(model, verify=share)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this cache has only sizes"):
        sized_cache(SizedLayout(8), budget_bytes=100, verify=0.5)


def test_of_a_loop_that_takes_over_after_prefill_the_state_is_compared() -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    spoil_live(cache, 0, 20)
    prompt = [*PROMPT_A, 1]
    with cache.begin(prompt) as session:
        caches = session.caches
        with pytest.warns(RuntimeWarning, match="from token 20 on"):
            session.prefill(model, step_size=STEP_SIZE)
        # The cache objects that the loop was given at first are the ones that are right now.
        assert all(a is b for a, b in zip(caches, session.caches, strict=True))
        logits = np.array(model(mx.array([prompt[-1:]]), cache=caches))
    assert np.array_equal(logits, cold(model, prompt)[0])
    cache.check()


# When a check breaks off


@pytest.mark.parametrize(("kind", "error"), [("llama", KeyboardInterrupt), ("nemotron_h", MemoryError)])
def test_a_check_that_breaks_off_leaves_the_session_as_it_was(kind: str, error: type[BaseException]) -> None:
    model = shared_model(kind)
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    expected = cold(model, prompt)
    for at in (1, 5, 7):
        cache = PrefixCache(model, verify=1.0)
        serve(cache, model, PROMPT_A)
        passes = 0

        def failing(tokens: mx.array, cache: Any, at: int = at) -> mx.array:
            nonlocal passes
            passes += 1
            logits: mx.array = model(tokens, cache=cache)
            if passes == at:
                raise error("broken off")
            return logits

        with cache.begin(prompt) as session:
            resumed = session.cached_tokens
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    session.prefill(failing, step_size=STEP_SIZE)
            else:
                session.prefill(failing, step_size=STEP_SIZE)
            cache.check()
            assert cache.stats.verify_bytes == 0
            assert session.cached_tokens == resumed
            assert not far_apart(answer(session, model), expected)
        cache.check()
        stats = cache.stats
        assert stats.verified_requests + stats.verify_skipped == 1
        assert (stats.verify_mismatches, stats.verify_bytes) == (0, 0)


@pytest.mark.parametrize("where", ["the comparison", "the model"])
def test_a_check_that_fails_is_warned_of_once_and_counted(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model("llama")
    cache = PrefixCache(model, verify=1.0)
    serve(cache, model, PROMPT_A)
    passes = 0

    def mistaken(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if where == "the comparison" or passes == 1:
            raise TypeError("a mistake")
        return model(tokens, *args, **kwargs)

    if where == "the comparison":
        monkeypatch.setattr("radixcache.verify.compare_states", mistaken)
    prompt = PROMPT_A
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            prompt = [*prompt, 0, 1, 2, *TURN]
            passes = 0
            found = serve(cache, mistaken if where == "the model" else model, prompt)
            assert not far_apart(found, cold(model, prompt))
    (told,) = caught
    assert str(told.message).startswith("verification failed with TypeError('a mistake').")
    assert (told.category, Path(told.filename).name) == (RuntimeWarning, "session.py")
    stats = cache.stats
    assert (stats.verified_requests, stats.verify_skipped, stats.verify_mismatches, stats.verify_bytes) == (0, 2, 0, 0)


@pytest.mark.parametrize(("kind", "moments"), [("llama", 5), pytest.param("nemotron_h", 12, marks=pytest.mark.slow)])
def test_after_ctrl_c_at_any_line_of_a_check_the_next_answer_is_right(kind: str, moments: int) -> None:
    model = shared_model(kind)
    prompt = [*PROMPT_A, 0, 1, 2, *TURN]
    expected = cold(model, prompt)

    def interrupted(line: int) -> tuple[int, int]:
        cache = PrefixCache(model, verify=1.0, live_slots=2)
        serve(cache, model, PROMPT_A)
        spoil_live(cache, 0, 20)
        with interruptible(), LineInterrupt(line).installed() as lines, suppress(KeyboardInterrupt):
            serve(cache, model, prompt)
        gc.collect()
        cache.check()
        assert cache.stats.verify_bytes == 0
        assert not far_apart(serve(cache, model, prompt), expected)
        assert cache.stats.verify_mismatches == len(cache.mismatches) == 1
        return lines.lines, cache.stats.quarantined

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        total, _ = interrupted(0)
        for line in range(1, total, total // moments):
            reached, quarantined = interrupted(line)
            assert reached >= line
            assert quarantined == 1


# Through the generators


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    wrapped = tiny_tokenizer()
    wrapped.eos_token_ids = set()
    return wrapped


def test_speculative_decoding_is_verified_up_to_its_prefill(tokenizer: Any) -> None:
    model, draft = shared_model("llama"), tiny_model("llama", seed=1)
    cache = PrefixCache(caches=lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)], verify=1.0)
    prompt = PROMPT_A
    for turn in range(3):
        more: dict[str, Any] = {"draft_model": draft, "max_tokens": 6}
        expected = [r.token for r in plain_stream_generate(model, tokenizer, mx.array(prompt), **more)]
        if turn == 2:
            spoil_live(cache, 0, 20)  # the draft model's last layer
            with pytest.warns(RuntimeWarning, match="from token 20 on"):
                responses = list(stream_generate(model, tokenizer, prompt, cache=cache, **more))
            assert {r.cached_tokens for r in responses} == {0}
        else:
            responses = list(stream_generate(model, tokenizer, prompt, cache=cache, **more))
        found = [r.token for r in responses]
        assert found == expected
        cache.check()
        prompt = [*prompt, *found, 7, 8]
    assert cache.stats.verified_requests == 2
    assert cache.stats.verify_mismatches == 1
