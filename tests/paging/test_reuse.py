"""Models whose state cannot be cut anywhere (windows, recurrent, chunked, hybrid) are not silently prefilled anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixcache import PrefixCache, Reason, ShortReason
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from runner.models.tiny import CHUNK_LENGTH, VOCABULARY_LENGTH, WINDOW_LENGTH, tiny_model
from tests import inside
from tests.groups.cold import opened, serve, shared_model
from tests.memory import held_bytes
from tests.prompts import tokens

TOO_LONG_KINDS = ["llama_sliding", "nemotron_h"]
POINT_KINDS = ["llama_sliding", "llama4", "nemotron_h"]
#: Chat templates rewrite at most this many tokens at the end of a prompt.
REWRITTEN_TAIL = 16

SYSTEM_LENGTH = 60


@pytest.fixture(scope="module", params=POINT_KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return shared_model(request.param)


SYSTEM = tokens(0, SYSTEM_LENGTH)
REPLY = [1, 2, 3]


def test_each_turn_resumes_16_tokens_before_the_last_prompts_end_when_the_template_rewrote_what_follows(
    model: Any,
) -> None:
    cache = PrefixCache(model)
    prompt = SYSTEM + tokens(1, 30)
    previous = 0
    for turn in range(3):
        session = serve(cache, model, prompt, tokens(100 + turn, 7))
        assert session.cached_tokens >= previous - REWRITTEN_TAIL
        previous = len(prompt)
        # The reply is stored, but the next prompt takes another way 15 tokens before this one's end.
        prompt = [*prompt[: previous - 15], *tokens(200 + turn, 45)]


def test_without_marks_the_third_user_resumes_at_the_end_of_the_system_prompt(model: Any) -> None:
    cache = PrefixCache(model)
    sessions = [serve(cache, model, SYSTEM + tokens(user, 40, first=user)) for user in range(4)]
    assert [s.matched_tokens for s in sessions] == [0, SYSTEM_LENGTH, SYSTEM_LENGTH, SYSTEM_LENGTH]
    assert [s.cached_tokens for s in sessions[2:]] == [SYSTEM_LENGTH, SYSTEM_LENGTH]
    # A chunked cache that was filled by one forward pass has lost nothing and is cut back: the second user gains too.
    second = sessions[1]
    assert (second.cached_tokens, second.reason) in [(0, ShortReason.NO_CHECKPOINT), (SYSTEM_LENGTH, None)]


def test_a_reason_is_given_exactly_when_less_than_the_match_is_resumed(model: Any) -> None:
    cache = PrefixCache(model)
    random = np.random.default_rng(5)
    served: list[list[int]] = [[]]
    short: dict[str, int] = {}
    for request in range(20):
        base = served[random.integers(len(served))]
        prompt = base[: random.integers(len(base) + 1)] + tokens(request, int(random.integers(1, 30)))
        session = serve(cache, model, prompt, tokens(request, 3))
        served.append([*prompt, *tokens(request, 3)])
        assert 0 <= session.cached_tokens <= session.matched_tokens <= len(prompt)
        assert session.cached_tokens < len(prompt)
        assert (session.reason is None) == (session.cached_tokens == session.matched_tokens)
        if session.reason is not None:
            short[session.reason] = short.get(session.reason, 0) + 1
    assert cache.stats.short_reasons == short
    assert short.keys() == ({ShortReason.NO_CHECKPOINT} if inside.layout(cache).has_states else set())


@pytest.mark.parametrize(("kind", "length"), [("llama_sliding", WINDOW_LENGTH), ("llama4", CHUNK_LENGTH)])
def test_a_window_whose_tokens_were_given_up_resumes_at_the_checkpoint_before(kind: str, length: int) -> None:
    model = tiny_model(kind)
    known = PrefixCache(model)
    serve(known, model, [1, 2])
    # What the checkpoints need: at the mark, at the tail and at the end.
    kept = length + length + REWRITTEN_TAIL
    cache = PrefixCache(model, checkpoint_budget_bytes=kept * inside.window_bytes(known))
    prompt = tokens(1, 5 * length)
    serve(cache, model, prompt, marks=[length])
    branch = prompt[: 2 * length] + tokens(2, 3, first=(prompt[2 * length] + 1) % VOCABULARY_LENGTH)
    (gap, _) = cache.explain(branch).gaps
    assert (gap.start, gap.end, gap.reason) == (length, 2 * length, Reason.WINDOW_GAP)
    session = serve(cache, model, branch)
    assert (session.matched_tokens, session.cached_tokens) == (2 * length, length)
    assert session.reason == ShortReason.WINDOW_GAP


def test_a_branch_resumes_at_the_last_checkpoint_of_the_interval(model: Any) -> None:
    cache = PrefixCache(model, checkpoint_interval=32)
    trunk = tokens(1, 200)
    with cache.begin(trunk) as session:
        session.prefill(model, step_size=50)
    for offset, resumed in ((150, 128), (100, 96), (65, 64), (40, 32)):
        branch = trunk[:offset] + tokens(offset, 10, first=(trunk[offset] + 1) % VOCABULARY_LENGTH)
        session = serve(cache, model, branch)
        assert session.matched_tokens == offset
        assert session.cached_tokens >= resumed


@pytest.mark.parametrize(("behind", "kinds"), [(3, ["tail"]), (15, ["tail"]), (16, ["branch", "tail"])])
def test_a_few_tokens_behind_a_mark_are_not_worth_a_checkpoint(behind: int, kinds: list[str]) -> None:
    cache, trunk = sized_cache(SizedLayout(1, 10), budget_bytes=1 << 20), list(range(200))
    for prompt in (trunk, [*trunk[: 50 + behind], *range(200, 300)]):
        with cache.begin(prompt, marks=[50]) as session:
            session.prefill(SizedModel())
            found = [each.kind for each in session.checkpoints]
    assert (session.matched_tokens, session.cached_tokens) == (50 + behind, 50)
    assert found == kinds


def test_the_cap_on_checkpoints_takes_those_of_the_interval_and_keeps_branches_marks_and_the_newest(
    model: Any,
) -> None:
    checkpoint_bytes = _checkpoint_bytes(model)
    cap_bytes = 6 * checkpoint_bytes
    cache = PrefixCache(model, checkpoint_interval=16, checkpoint_budget_bytes=cap_bytes)
    trunk = tokens(1, 230)
    branch = trunk[:90] + tokens(2, 120, first=(trunk[90] + 1) % VOCABULARY_LENGTH)
    serve(cache, model, trunk, REPLY, marks=[50])
    assert cache.stats.checkpoint_bytes <= cap_bytes
    serve(cache, model, branch, REPLY, marks=[50])
    assert cache.stats.checkpoint_bytes <= cap_bytes
    kept = _checkpoint_kinds(cache)
    assert {"mark", "branch", "end"} <= set(kept), kept
    # The branch point, the mark and both ends are resumed where they were made.
    assert serve(cache, model, [*branch, 1, 2, 3, 4]).cached_tokens == len(branch) + 3
    third = trunk[:90] + tokens(3, 10, first=(trunk[90] + 2) % VOCABULARY_LENGTH)
    assert serve(cache, model, third).cached_tokens == 90
    fourth = trunk[:50] + tokens(4, 10, first=(trunk[50] + 1) % VOCABULARY_LENGTH)
    assert serve(cache, model, fourth).cached_tokens == 50
    assert serve(cache, model, [*trunk, 1, 2, 3, 4]).cached_tokens == len(trunk) + 3


def test_under_a_cap_a_prefill_gives_up_the_checkpoint_whose_neighbours_are_closest_together() -> None:
    layout = SizedLayout(1, 10)
    cache = sized_cache(layout, budget_bytes=1 << 20, checkpoint_interval=32, checkpoint_budget_bytes=40)
    with cache.begin(list(range(98)), marks=[68]) as session:
        session.prefill(SizedModel())
        assert [(each.offset, each.kind) for each in session.checkpoints] == [
            (32, "interval"),  # 64 lay between 32 and 68
            (68, "mark"),
            (82, "tail"),
            (96, "interval"),
        ]


def test_a_prefill_that_ends_with_an_interval_takes_its_checkpoint_too() -> None:
    cache = sized_cache(SizedLayout(1, 10), budget_bytes=1 << 20, checkpoint_interval=32)
    with cache.begin(list(range(65))) as session:
        session.prefill(SizedModel())
        assert [each.offset for each in session.checkpoints] == [32, 49, 64]


def test_a_step_that_goes_on_behind_the_prompt_adds_only_what_is_new() -> None:
    cache = sized_cache(SizedLayout(1), budget_bytes=1 << 20)
    with cache.begin([1, 2, 3, 4]) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), [4, 5, 6])
        assert session.known_tokens == 6
    assert cache.explain([1, 2, 3, 4, 5, 6, 7]).resumable_tokens == 6


def test_a_cap_too_small_for_any_checkpoint_still_lets_the_next_turn_resume(model: Any) -> None:
    cache = PrefixCache(model, checkpoint_interval=16, checkpoint_budget_bytes=1)
    prompt = tokens(1, 100)
    serve(cache, model, prompt, REPLY, marks=[40])
    assert "interval" not in _checkpoint_kinds(cache)
    again = serve(cache, model, [*prompt, 1, 2, 3, *tokens(2, 20)], marks=[40])
    assert again.cached_tokens == len(prompt) + 3
    other = prompt[:40] + tokens(3, 20, first=(prompt[40] + 1) % VOCABULARY_LENGTH)
    assert serve(cache, model, other).cached_tokens == 40


def _checkpoint_bytes(model: Any) -> int:
    """Bytes of one checkpoint of this model, of a prompt that has wrapped every window."""
    cache = PrefixCache(model)
    with cache.begin(tokens(1, 230)) as session:
        session.prefill(model)
    count = len(_checkpoint_kinds(cache))
    assert count == 2, cache.dump()
    return cache.stats.checkpoint_bytes // count


def _checkpoint_kinds(cache: PrefixCache) -> list[str]:
    """What the checkpoints in the tree were made for."""
    return [node.checkpoint for node in cache.view().nodes if node.checkpoint]


@pytest.mark.parametrize("about", [{"turn": -1}, {"turn": "3"}, {"turn": True}, {"priority": 1.5}, {"kind": None}])
def test_what_a_policy_could_make_nothing_of_is_refused_before_anything_runs(about: dict[str, Any]) -> None:
    cache = PrefixCache(tiny_model("llama"))
    with pytest.raises(ValueError, match=f"{next(iter(about))} .*wanted"):
        cache.begin([1, 2, 3], **about)
    assert cache.stats.requests == 0
    with cache.begin([1, 2, 3], turn=1, priority=-1, kind="agent"):
        pass


@pytest.mark.parametrize("kind", TOO_LONG_KINDS)
def test_the_next_turn_resumes_as_far_as_the_budget_reaches(kind: str) -> None:
    model, prompt = shared_model(kind), tokens(1, 700)
    whole = PrefixCache(model)
    serve(whole, model, prompt[:600], REPLY)
    budget_bytes = whole.stats.live_bytes // 3
    cache = PrefixCache(model, budget_bytes=budget_bytes, checkpoint_interval=16)
    assert serve(cache, model, prompt[:600], REPLY).cached_tokens == 0
    for length in (650, 700):
        assert 100 <= serve(cache, model, prompt[:length], REPLY).cached_tokens < 500
        assert held_bytes(cache.stats) <= budget_bytes


@pytest.mark.parametrize("kind", [*TOO_LONG_KINDS, pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_as_many_tokens_are_kept_as_the_budget_has_room_for(kind: str, share: float) -> None:
    model, prompt = shared_model(kind), tokens(1, 700)
    whole = PrefixCache(model)
    serve(whole, model, prompt)
    layout = inside.layout(whole)
    budget_bytes = int(share * layout.request_bytes(700))
    cache = PrefixCache(model, budget_bytes=budget_bytes)
    serve(cache, model, tokens(2, 50))
    serve(cache, model, prompt, REPLY)
    # Point state is live and in the tree.
    point_bytes = layout.request_bytes(700) - 700 * layout.token_bytes
    room = (budget_bytes - 2 * point_bytes) // layout.token_bytes
    assert room - 1 <= cache.explain(prompt).resumable_tokens <= room
    assert held_bytes(cache.stats) <= budget_bytes


@pytest.mark.parametrize("kind", TOO_LONG_KINDS)
def test_a_budget_of_one_byte_still_serves(kind: str) -> None:
    model, cache = opened(kind, budget_bytes=1)
    for _ in range(2):
        assert serve(cache, model, tokens(1, 100), REPLY).cached_tokens == 0
        assert held_bytes(cache.stats) == 0
