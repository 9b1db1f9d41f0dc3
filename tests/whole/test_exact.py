"""exact=True: a warm request computes bit for bit what a cold one computes, and the statistics say what that costs.

Every logit is compared without tolerance: of each prefill chunk, of the prompt's last token and of the decoded tokens.
The cold run is a plain loop over mlx-lm's own caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from radixcache import PrefixCache, ShortReason, stream_generate
from runner.models.tiny import TINY_KINDS, tiny_model, tiny_tokenizer
from tests import inside
from tests.prompts import tokens
from tests.whole.exact_logits import REPLY, STEP, Logits, Recorded, differing, exact_cache, plain, serve

FAST_KINDS = ["step3p5", "falcon_h1"]
#: One of each kind of state: spans, windows, chunks, recurrent, a mix.
WALKED_KINDS = ["llama", "llama_sliding", "llama4", "mamba2", "falcon_h1"]

SYSTEM = tokens(0, 40)


class Request(NamedTuple):
    """A prompt, how it is begun, and what is decoded behind it."""

    name: str
    prompt: list[int]
    begin: dict[str, Any]
    reply: Sequence[int] = REPLY[:1]


def timeline() -> list[Request]:
    """Requests of two users who share a system prompt, grow, part inside a chunk, and come back; with options."""
    anna, ben = [*SYSTEM, *tokens(1, 37)], [*SYSTEM, *tokens(2, 30)]
    branch = [*anna[:55], *tokens(3, 41)]
    grown = [*anna, *REPLY, *tokens(4, 30)]
    return [
        Request("anna", anna, {"marks": [40], "reserve": 0}, REPLY),
        Request("ben", ben, {"marks": [40]}),
        Request("anna grown", grown, {"reserve": 300}, REPLY),
        Request("ben again", ben, {}),
        Request("branch", branch, {"reserve": 3}, REPLY),
        Request("branch grown", [*branch, *REPLY, *tokens(5, 50)], {}),
        Request("anna again", anna, {}),
        # Their end lies on the grid, and one token behind it; a prompt shorter than a chunk.
        Request("to the grid", grown[:96], {}),
        Request("one behind", grown[:97], {}),
        Request("short", SYSTEM[:9], {}),
        Request("anna on", [*grown, *REPLY, *tokens(6, 45)], {}),
        Request("ben on", [*ben, *tokens(7, 60)], {"marks": [67]}),
    ]


def other_answers(cache: PrefixCache, model: Any, cold: dict[str, Logits]) -> dict[str, list[int]]:
    """Run the timeline; return the requests whose logits differ from the cold ones, and where."""
    differences = {name: differing(logits, cold[name]) for name, logits in served(model, lambda: cache).items()}
    return {name: offsets for name, offsets in differences.items() if offsets}


def plain_answers(model: Any) -> dict[str, Logits]:
    return {each.name: plain(model, each.prompt, each.reply) for each in timeline()}


@functools.cache
def model_and_plain_answers(kind: str) -> tuple[Any, dict[str, Logits]]:
    model: Any = tiny_model(kind)
    return model, plain_answers(model)


def served(model: Any, make: Callable[[], PrefixCache]) -> dict[str, Logits]:
    """The answers to the timeline by caches made for it: with a new one for each request, cold ones."""
    return {each.name: serve(make(), model, each.prompt, each.reply, **each.begin) for each in timeline()}


KINDS = [pytest.param(k, marks=[pytest.mark.slow] * (k not in FAST_KINDS)) for k in TINY_KINDS]
SOME_KINDS = [pytest.param(k, marks=[pytest.mark.slow] * (k != "llama")) for k in WALKED_KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_answers_are_those_of_mlx_lm_to_the_bit(kind: str) -> None:
    model, cold = model_and_plain_answers(kind)
    roomy = exact_cache(model)
    assert other_answers(roomy, model, cold) == {}
    assert roomy.stats.hit_tokens > 0
    tight = exact_cache(model, budget_bytes=roomy.stats.peak_bytes // 2)
    assert other_answers(tight, model, cold) == {}
    assert tight.stats.evictions > 0


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_so_they_are_once_more_in_two_slots_and_after_memory_was_given_back(kind: str) -> None:
    model, cold = model_and_plain_answers(kind)
    cache = exact_cache(model)
    resumed = 0
    for _ in range(2):
        assert other_answers(cache, model, cold) == {}
        assert cache.stats.hit_tokens > 2 * resumed
        resumed = cache.stats.hit_tokens
    assert other_answers(exact_cache(model, live_slots=2), model, cold) == {}
    for target_bytes in (cache.stats.paged_bytes // 2, 0):
        cache.reclaim(target_bytes)
        cache.check()
        assert other_answers(cache, model, cold) == {}


def test_without_exact_warm_answers_differ_in_their_last_bits() -> None:
    model: Any = tiny_model("falcon_h1")
    cold = served(model, lambda: PrefixCache(model, step_size=STEP))
    assert other_answers(PrefixCache(model, step_size=STEP), model, cold)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_in_half_precision_exact_answers_are_equal_where_others_are_far_apart(dtype: mx.Dtype) -> None:
    model: Any = tiny_model("falcon_h1")
    model.set_dtype(dtype)
    assert other_answers(exact_cache(model), model, plain_answers(model)) == {}
    free = PrefixCache(model, step_size=STEP)
    cold = served(model, lambda: PrefixCache(model, step_size=STEP))
    warm = served(model, lambda: free)
    errors = [np.abs(row - cold[name][at]).max() for name, logits in warm.items() for at, row in logits.items()]
    assert max(errors) > 1e-3


@pytest.mark.parametrize("kind", ["llama_sliding", "falcon_h1"])
def test_fetched_caches_stand_on_the_grid_and_give_cold_answers(kind: str) -> None:
    model: Any = tiny_model(kind)
    cache = exact_cache(model)
    prompt = [*SYSTEM, *tokens(1, 50)]
    serve(cache, model, prompt)
    longer = [*prompt, *REPLY, *tokens(2, 30)]
    cold = serve(exact_cache(model), model, longer)
    caches, remaining = cache.fetch(longer)
    start = len(longer) - len(remaining)
    assert start == 80
    recorded = Recorded(model, start)
    last = len(longer) - 1
    for low in range(start, last, STEP):
        recorded(mx.array(longer[low : min(low + STEP, last)])[None], cache=caches)
    for token in (longer[-1], *REPLY):
        recorded(mx.array([[token]]), cache=caches)
    assert differing(recorded.logits, cold) == []


def rotating(max_size: int) -> dict[str, Any]:
    return {"caches": lambda: [RotatingKVCache(max_size=max_size) for _ in tiny_model("llama").layers]}


# A window is cut back to the grid only before it wraps.
@pytest.mark.parametrize("more", [{"kv_bits": 8}, rotating(100), pytest.param(rotating(512), marks=pytest.mark.slow)])
def test_quantized_caches_and_windows_of_the_callers_give_the_answers_of_a_cold_cache(more: dict[str, Any]) -> None:
    model: Any = tiny_model("llama")
    cold = served(model, lambda: exact_cache(model, **more))
    cache = exact_cache(model, **more)
    for _ in range(2):
        assert other_answers(cache, model, cold) == {}
    assert cache.stats.hit_tokens % STEP == 0
    assert cache.stats.hit_tokens > 800


# What is resumed, what is stored, and what it costs


@pytest.mark.parametrize(
    ("kind", "stored", "shared", "resumed", "reason", "off_grid"),
    [
        # The chunks of 70 tokens end at 16, 32, 48, 64 and 69; the reply follows.
        ("llama_sliding", 70, 70 + len(REPLY), 64, ShortReason.OFF_GRID, 6 + len(REPLY)),
        ("qwen3_next", 70, 70 + len(REPLY), 64, ShortReason.OFF_GRID, 6 + len(REPLY)),
        # A branch inside of a chunk.
        ("llama", 70, 45, 32, ShortReason.OFF_GRID, 13),
        ("mamba2", 70, 45, 32, ShortReason.OFF_GRID, 13),
        # Of the 56 tokens 48 are short for want of a checkpoint.
        ("mamba2", 150, 120, 64, ShortReason.NO_CHECKPOINT, 8),
        # The prompt ends one token behind the grid.
        ("llama", 100, 65, 64, ShortReason.LAST_TOKEN, 0),
    ],
)
def test_a_request_resumes_on_the_grid_and_says_why_not_later(
    kind: str, stored: int, shared: int, resumed: int, reason: ShortReason, off_grid: int
) -> None:
    model: Any = tiny_model(kind)
    cache = exact_cache(model)
    prompt = [*tokens(1, stored), *REPLY]
    serve(cache, model, prompt[:stored], marks=[40] if shared == 45 else [])
    more = [] if reason is ShortReason.LAST_TOKEN else tokens(2, 30)
    with cache.begin([*prompt[:shared], *more]) as session:
        assert (session.cached_tokens, session.matched_tokens, session.reason) == (resumed, shared, reason)
    assert cache.stats.off_grid_tokens == off_grid
    assert cache.stats.short_reasons == {str(reason): 1}


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_nothing_is_kept_that_nothing_resumes_on(kind: str) -> None:
    model: Any = tiny_model(kind)
    cache = exact_cache(model)
    serve(cache, model, tokens(1, 70), marks=[20, 30])
    assert cache.stats.tokens == 64
    serve(cache, model, tokens(2, STEP))  # its last token is not prefilled: no whole chunk
    assert cache.stats.tokens == 64
    serve(cache, model, tokens(2, STEP))
    assert cache.stats.short_reasons == {"off_grid": 1}
    cache.clear()
    stats = cache.stats
    assert (stats.live_bytes, stats.paged_bytes, stats.nodes) == (0, 0, 0)
    serve(cache, model, tokens(2, STEP))
    assert cache.stats.short_reasons == {"off_grid": 1}


@pytest.mark.parametrize("kind", ["llama_sliding", "qwen3_next"])
def test_checkpoints_stand_on_the_grid(kind: str) -> None:
    model: Any = tiny_model(kind)
    cache = exact_cache(model, checkpoint_interval=20)
    serve(cache, model, tokens(1, 100), marks=[33, 40, 47, 70])
    found = {n.end: found.kind for n in inside.nodes(cache) if (found := n.payload.checkpoint) is not None}
    assert found == {16: "interval", 32: "mark", 48: "interval", 64: "mark", 80: "tail", 96: "end"}


def test_decoded_tokens_are_not_resumed_and_a_prefill_over_them_is() -> None:
    model: Any = tiny_model("llama")
    cache = exact_cache(model)
    prompt, reply = tokens(1, 20), tokens(2, 60)
    serve(cache, model, prompt, reply)
    assert cache.stats.tokens == STEP
    whole = [*prompt, *reply, 1]
    serve(cache, model, whole)
    assert cache.stats.off_grid_tokens == len(prompt) + len(reply) - STEP
    with cache.begin([*whole, 2]) as session:
        assert session.cached_tokens == 80


def test_a_loop_of_the_callers_own_is_not_resumed_beyond_the_prefill() -> None:
    model: Any = tiny_model("qwen3_next")
    cache = exact_cache(model)
    prompt = tokens(1, 50)
    with cache.begin(prompt) as session:
        session.prefill(model)
        session.extend(REPLY)
        for token in (prompt[-1], *REPLY):
            model(mx.array([[token]]), cache=session.caches)
    cache.check()
    assert cache.stats.tokens == 48
    with cache.begin(tokens(3, 50)) as session:
        # In whole chunks, but nobody but prefill() says so.
        for start in range(0, 48, STEP):
            session.step(model, tokens(3, 50)[start : start + STEP])
    cache.check()
    assert cache.stats.tokens == 48


def test_what_an_own_loop_took_back_is_not_resumed() -> None:
    model: Any = tiny_model("llama")
    cache = exact_cache(model)
    prompt = tokens(1, 50)
    with cache.begin(prompt) as session:
        session.prefill(model)
        for layer in session.caches:
            layer.trim(30)
        # Token by token over what was a whole chunk.
        for token in prompt[19:]:
            session.step(model, [token])
    cache.check()
    assert cache.stats.tokens == STEP
    cold = serve(exact_cache(model), model, prompt)
    assert differing(serve(cache, model, prompt), cold) == []


def test_another_step_size_and_less_than_a_chunk_are_refused_with_the_reason() -> None:
    model: Any = tiny_model("llama")
    cache = exact_cache(model)
    with (
        cache.begin(tokens(1, 40)) as session,
        pytest.raises(ValueError, match="step_size is 8; the exact cache was made with 16 and stores only"),
    ):
        session.prefill(model, step_size=8)
    with pytest.raises(ValueError, match="15 tokens; wanted at least a whole chunk of 16"):
        cache.pin(tokens(1, 15))
    with pytest.raises(ValueError, match="step_size is 8; the exact cache"):
        list(stream_generate(model, tiny_tokenizer(), [1, 2, 3], max_tokens=1, cache=cache, prefill_step_size=8))
    cache.check()
    free = PrefixCache(model, step_size=16)
    with free.begin(tokens(1, 40)) as session:
        session.prefill(model, step_size=8)
    with pytest.raises(ValueError, match="step_size is 0; wanted"):
        PrefixCache(model, step_size=0)


def test_prefill_takes_the_step_size_of_the_cache() -> None:
    model: Any = tiny_model("llama")
    for exact in (True, False):
        lengths: list[int] = []

        def watched(ids: mx.array, cache: Any, lengths: list[int] = lengths) -> Any:
            lengths.append(ids.shape[1])
            return model(ids, cache=cache)

        with PrefixCache(model, exact=exact, step_size=STEP).begin(tokens(1, 40)) as session:
            session.prefill(watched)
        assert lengths == [16, 16, 7]


def test_caches_of_somebody_else_are_refused_since_nobody_knows_how_they_were_made() -> None:
    model: Any = tiny_model("llama")
    cache = exact_cache(model)
    caches = make_prompt_cache(model)
    model(mx.array([tokens(1, 32)]), cache=caches)
    with pytest.raises(ValueError, match=r"insert\(\) into an exact cache, whose chunks"):
        cache.insert(tokens(1, 32), caches)
    assert cache.stats.nodes == 0


@pytest.mark.parametrize(("kind", "drafts"), [("llama", True), ("qwen3_next", False)])
def test_generated_tokens_and_their_log_probabilities_are_those_of_a_cold_stream(kind: str, drafts: bool) -> None:
    model, draft = (tiny_model(kind, seed) for seed in (0, 1))
    more: dict[str, Any] = {"draft_model": draft} if drafts else {}

    def make() -> PrefixCache:
        models = [model, draft][: 1 + drafts]
        return exact_cache(model, caches=lambda: [cache for each in models for cache in make_prompt_cache(each)])

    cache, prompt = make(), [*SYSTEM, *tokens(1, 50)]
    for turn in range(3):
        warm, cold = (
            list(stream_generate(model, tiny_tokenizer(), prompt, max_tokens=6, cache=each, **more))
            for each in (cache, make())
        )
        assert [(r.token, r.from_draft) for r in warm] == [(r.token, r.from_draft) for r in cold]
        assert all(mx.array_equal(w.logprobs, c.logprobs) for w, c in zip(warm, cold, strict=True))
        assert warm[0].cached_tokens % STEP == 0
        assert (warm[0].cached_tokens > 0) == (turn > 0)
        cache.check()
        prompt = [*prompt, *[r.token for r in warm], *tokens(10 + turn, 20)]
