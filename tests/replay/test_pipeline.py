"""`generate` streams one reply, whatever ends it, and leaves the run knowing what its caches hold."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from runner.engine.generation import compile_mode, feed, generate
from runner.models.load import load_model
from runner.replay.caches import PlainRun
from tests.engine.compiled import is_compiling

PROMPT = np.arange(30, 130, dtype=np.int32)
# Small enough for the allocator to keep, large enough to be seen among what decoding leaves.
FREED_BYTES = 4 << 20


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


class CountingRun(PlainRun):
    """A run that counts its steps."""

    steps = 0

    def step(self, model, tokens):
        self.steps += 1
        return super().step(model, tokens)


def begin(tiny):
    return CountingRun(PROMPT, make_prompt_cache(tiny.model))


def completion_of(pieces):
    completions = [piece.completion for piece in pieces if piece.completion is not None]
    assert len(completions) == 1
    assert pieces[-1].completion is completions[0]
    return completions[0]


def reply(tiny, run=None, sampled=None, **more):
    """The pieces of a reply; `sampled` are the tokens of the sampler, whatever the logits are."""
    script = iter(sampled or ())
    sampler = None if sampled is None else lambda logprobs: mx.array([next(script)])
    options = {"max_tokens": 50, "stop_tokens": (), "sampler": sampler, "model": tiny.model, **more}
    return generate(run or begin(tiny), options.pop("model"), tiny.tokenizer, **options)


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def test_greedy_tokens_are_those_of_mlx_lm(tiny):
    expected = [token for token, _ in generate_step(mx.array(PROMPT), tiny.model, max_tokens=12)]
    pieces = list(reply(tiny, max_tokens=12))
    assert [piece.token for piece in pieces] == expected
    assert completion_of(pieces).tokens == tuple(expected)


def test_chunked_prefill_gives_the_logprobs_of_a_single_forward_pass_and_says_how_far_it_is(tiny):
    whole, seen = tiny.model(mx.array(PROMPT)[None])[0, -1].astype(mx.float32), []
    expected = np.array(whole - mx.logsumexp(whole))
    piece = next(reply(tiny, max_tokens=1, step_size=40, on_progress=lambda *place: seen.append(place)))
    assert np.abs(np.array(piece.logprobs) - expected).max() < 1e-4
    assert piece.token == int(expected.argmax())
    assert seen == [(0, 100), (40, 100), (80, 100), (99, 100), (100, 100)]


def test_a_stop_token_ends_the_reply_and_brings_no_text(tiny):
    stop = next(iter(tiny.tokenizer.eos_token_ids))
    letters = tiny.tokenizer.encode("ab", add_special_tokens=False)
    run = begin(tiny)
    pieces = list(reply(tiny, run, [*letters, stop, stop], stop_tokens=None))
    completion = completion_of(pieces)
    assert text_of(pieces) == "ab"
    assert (completion.done_reason, completion.tokens) == ("stop", (*letters, stop))
    # Its forward pass was dispatched already, and the run knows.
    assert run.finish().tolist() == [*PROMPT, *letters, stop]


def test_counts_and_durations_belong_to_prompt_and_completion(tiny):
    completion = completion_of(list(reply(tiny, max_tokens=5, arrived_at_s=0.0)))
    assert (completion.done_reason, completion.completion_tokens) == ("length", 5)
    assert (completion.prompt_tokens, completion.cached_tokens) == (len(PROMPT), 0)
    # Arrival at 0 on the clock of perf_counter: all that came before prefill counts for the first token.
    assert completion.ttft_ms > completion.prompt_ms > 0
    assert completion.completion_ms > 0


def test_cancelling_between_chunks_keeps_the_chunks_that_were_done(tiny):
    run, offsets = begin(tiny), [0]
    progress = {"cancelled": lambda: offsets[-1] >= 40, "on_progress": lambda offset, _: offsets.append(offset)}
    pieces = list(reply(tiny, run, step_size=40, **progress))
    completion = completion_of(pieces)
    assert (completion.done_reason, completion.tokens, completion.ttft_ms) == ("cancelled", (), None)
    assert run.steps == 0
    assert run.finish().tolist() == PROMPT[:40].tolist()
    assert {cache.offset for cache in run.caches} == {40}


def test_cancelling_before_the_start_evaluates_nothing_and_between_tokens_ends_with_the_tokens_so_far(tiny):
    run = begin(tiny)
    assert completion_of(list(reply(tiny, run, cancelled=lambda: True))).done_reason == "cancelled"
    assert all(cache.empty() for cache in run.caches)
    run, pieces = begin(tiny), []
    for piece in reply(tiny, run, range(40, 90), cancelled=lambda: len(pieces) == 3):
        pieces.append(piece)
    completion = completion_of(pieces)
    assert (completion.done_reason, completion.tokens) == ("cancelled", (40, 41, 42, 43))
    assert run.finish().tolist() == [*PROMPT, 40, 41, 42, 43]


def test_a_generator_closed_early_leaves_a_run_that_knows_what_its_caches_hold(tiny):
    run = begin(tiny)
    pieces = reply(tiny, run, range(40, 90))
    assert next(pieces).token == 40
    pieces.close()
    assert run.finish().tolist() == [*PROMPT, 40]
    assert {cache.offset for cache in run.caches} == {len(PROMPT) + 1}


def test_feeding_a_reply_leaves_the_state_that_stepping_through_it_leaves(tiny):
    recorded = np.arange(60, 100, dtype=np.int32)
    fed, stepped = begin(tiny), begin(tiny)
    for run in (fed, stepped):
        next(reply(tiny, run, max_tokens=1))
    assert feed(fed, tiny.model, recorded, step_size=16) == len(recorded)
    for token in recorded:
        stepped.step(tiny.model, mx.array([int(token)]))
    assert fed.finish().tolist() == stepped.finish().tolist() == [*PROMPT, *recorded]
    for left, right in zip(fed.caches, stepped.caches, strict=True):
        assert left.offset == right.offset == len(PROMPT) + len(recorded)
        difference = mx.abs(left.keys[..., : left.offset, :] - right.keys[..., : right.offset, :]).max().item()
        assert difference < 1e-4


def test_free_buffers_are_released_after_256_passes(tiny):
    held_free = []
    pieces = reply(tiny, max_tokens=260)
    next(pieces)
    freed = mx.zeros((FREED_BYTES,), mx.uint8)
    mx.eval(freed)
    del freed
    for _ in pieces:
        held_free.append(mx.get_cache_memory())
    # The first piece was taken above: index 253 is piece 255, which is read behind the dispatch of pass 256.
    assert held_free[252] >= FREED_BYTES
    assert held_free[253] < FREED_BYTES


def test_compiled_mode_that_was_off_for_the_whole_process_stays_off(monkeypatch):
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    mx.disable_compile()
    try:
        with compile_mode(SimpleNamespace(enable_compile=False)):
            pass
        assert not is_compiling()
    finally:
        mx.enable_compile()
