"""RadixBatchGenerator: mlx-lm's BatchGenerator on a PrefixCache, driven as a server drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from radixcache import PrefixCache
from radixcache.mlx_server import RadixBatchGenerator
from tests.groups.cold import shared_model
from tests.prompts import tokens

KINDS = ["llama", "gemma3_text", "nemotron_h"]
SYSTEM = tokens(1, 100)
REPLY_TOKENS = 4


class Counted:
    """A model that counts the tokens of each pass, with padding."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[int] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.passes.append(tokens.size)
        logits: mx.array = self._model(tokens, cache=cache)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def opened(kind: str, **options: Any) -> tuple[Counted, RadixBatchGenerator]:
    model = Counted(shared_model(kind))
    return model, RadixBatchGenerator(model, prefixes=PrefixCache(shared_model(kind)), **options)


def replies(generator: BatchGenerator, uids: Sequence[int]) -> list[list[int]]:
    """Run until these uids have their replies; return them in order."""
    said: dict[int, list[int]] = {uid: [] for uid in uids}
    open_uids = set(uids)
    while open_uids:
        for each in generator.next()[1]:
            said[each.uid].append(each.token)
            if each.finish_reason is not None:
                open_uids.remove(each.uid)
    if getattr(generator, "prefixes", None) is not None:
        generator.prefixes.check()
    return [said[uid] for uid in uids]


def ask(generator: BatchGenerator, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    return replies(generator, generator.insert([*map(list, prompts)], [REPLY_TOKENS] * len(prompts), **options))


def cold(kind: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [ask(BatchGenerator(shared_model(kind)), [prompt])[0] for prompt in prompts]


def first_tokens(generator: BatchGenerator, prompts: Sequence[list[int]]) -> list[int]:
    """Uids of the prompts, in the order of the first tokens of their replies."""
    uids = generator.insert(prompts, [REPLY_TOKENS] * len(prompts))
    seen: dict[int, None] = {}
    while len(seen) < len(uids):
        seen |= dict.fromkeys(each.uid for each in generator.next()[1])
    return [*seen]


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_of_prompts_that_come_at_once_is_evaluated_once(kind: str) -> None:
    prompts = [[*SYSTEM, user, *tokens(user, 19)] for user in range(4)]
    model, generator = opened(kind)
    assert ask(generator, prompts) == cold(kind, prompts)
    assert sum(model.passes) == 100 + 4 * (20 + REPLY_TOKENS - 1) + 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_comes_during_a_prefill_waits_for_what_it_shares(kind: str) -> None:
    first, second = ([*SYSTEM, user, *tokens(user, 99)] for user in range(2))
    model, generator = opened(kind, prefill_step_size=50)
    uids = generator.insert([first], [REPLY_TOKENS])
    generator.marks[uids[0]] = [100]
    generator.next()
    uids += generator.insert([second], [REPLY_TOKENS])
    assert replies(generator, uids) == cold(kind, [first, second])
    assert sum(model.passes) <= 100 + 2 * 100 + 2 * REPLY_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_evaluates_only_what_is_new(kind: str) -> None:
    model, generator = opened(kind)
    ((*said,),) = ask(generator, [SYSTEM])
    longer = [*SYSTEM, *said, *tokens(2, 30)]
    before = len(model.passes)
    assert ask(generator, [longer]) == cold(kind, [longer])
    assert sum(model.passes[before:]) == 30 + REPLY_TOKENS
    assert ask(generator, [longer]) == cold(kind, [longer])
    assert generator.prefixes is not None
    assert generator.prefixes.stats.miss_tokens == 100 + 30 + 1


def test_the_third_prompt_resumes_where_the_second_left_the_first_with_recurrent_layers() -> None:
    _, generator = opened("nemotron_h")
    prompts = [[*SYSTEM, user, *tokens(user, 79)] for user in range(3)]
    for prompt in prompts:
        assert ask(generator, [prompt]) == cold("nemotron_h", [prompt])
    assert generator.prefixes is not None
    assert generator.prefixes.stats.hit_tokens == 100


def test_a_prompt_with_caches_of_its_own_is_left_alone() -> None:
    _, generator = opened("llama")
    caches = make_prompt_cache(shared_model("llama"))
    shared_model("llama")(mx.array([SYSTEM]), cache=caches)
    assert ask(generator, [tokens(5, 80)], caches=[caches]) == cold("llama", [[*SYSTEM, *tokens(5, 80)]])
    assert generator.prefixes is not None
    assert generator.prefixes.stats.requests == generator.prefixes.stats.tokens == 0


def test_prompts_begin_in_the_order_in_which_they_came_and_wait_for_no_state_that_was_not_stored() -> None:
    long, short = [*SYSTEM, 1, *tokens(2, 399)], [*SYSTEM, 2, *tokens(3, 19)]
    _, generator = opened("llama", prefill_batch_size=2)
    first, second, *_, last = first_tokens(generator, [[*SYSTEM, 3], short, tokens(4, 30), tokens(5, 30)])
    assert {first, second} == {0, 2}
    assert last == 3
    nothing_fits = PrefixCache(shared_model("llama"), budget_bytes=1)
    generator = RadixBatchGenerator(shared_model("llama"), prefixes=nothing_fits, prefill_step_size=50)
    assert first_tokens(generator, [long, short]) == [1, 0]


def test_a_prompt_that_is_removed_keeps_nobody_waiting() -> None:
    _, generator = opened("llama", prefill_step_size=50)
    prompts = [[*SYSTEM, user, *tokens(user, 19)] for user in range(3)]
    uids = generator.insert(prompts, [REPLY_TOKENS] * 3)
    generator.next()
    generator.remove(uids[:1])
    assert replies(generator, uids[1:]) == cold("llama", prompts[1:])


def test_state_that_does_not_fit_the_cache_is_not_stored_and_the_reply_is_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = RadixBatchGenerator(shared_model("llama"), prefixes=PrefixCache(shared_model("gemma3_text")))
    assert ask(generator, [SYSTEM]) == cold("llama", [SYSTEM])
    assert "the state of 99 tokens is not stored: " in caplog.text


def test_segments_end_where_the_caller_wants() -> None:
    _, generator = opened("llama")
    generator.insert_segments([[SYSTEM[:30], SYSTEM[30:40], SYSTEM[40:]]], [1])
    ends: list[int] = []
    said: list[Any] = []
    while not said:
        prompts, said = generator.next()
        ends += [each.progress[0] for each in prompts if each.end_of_segment and not each.end_of_prompt]
    assert ends == [30, 40, 99]


def test_without_a_cache_it_is_mlx_lms_generator() -> None:
    assert ask(RadixBatchGenerator(shared_model("llama")), [SYSTEM]) == cold("llama", [SYSTEM])
