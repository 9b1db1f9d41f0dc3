"""Checks: drafted tokens of several rows in one pass, of which each row keeps as many as are right."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from radixcache import CacheFullError, PrefixCache
from runner.models.tiny import TINY_KINDS, tiny_model
from tests.groups.cold import ROUNDING, cold, error, resumed, shared_model
from tests.groups.rows import Talk, known, prefilled, row_bytes, talking
from tests.prompts import tokens

#: Tails, windows beside tails, recurrent states beside tails, and a kind whose rows go one by one.
FAST = ("llama", "gemma3_text", "qwen3_next", "gpt_bigcode")
#: All kinds that groups take.
KINDS = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
    for kind in TINY_KINDS
    if kind not in ("llama4", "deepseek_v41")
]


#: Kinds of which rows with fewer drafts than others are not checked together with them.
APART = (
    "gpt_bigcode",
    "mamba",
    "rwkv7",
    "jamba",
    "nemotron_h",
    "recurrent_gemma",
    "baichuan_m1",
    "longcat_flash_ngram",
)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_checked_in_one_pass_unless_a_layer_takes_padding_as_tokens(kind: str) -> None:
    model = shared_model(kind)
    with PrefixCache(model).begin_many(capacity=100) as group:
        assert group.drafts_together(model) == (kind not in APART)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segment_bytes", [0, None])
def test_rows_that_keep_different_numbers_of_drafted_tokens_say_what_they_say_alone(
    kind: str, segment_bytes: int | None
) -> None:
    system = tokens(1, 40)
    prompts = [[*system, *tokens(2, 9)], [*system, *tokens(3, 14)], tokens(4, 7)]
    with talking(kind, prompts, stores=system, segment_bytes=segment_bytes) as talk:
        talk.prefill(*talk.rows)
        for most in (4, 1, 6, 4):
            talk.check_drafts(*talk.rows, most=most)
        talk.step(*talk.rows)
        talk.rows.pop(1).close()
        for _ in range(3):
            talk.check_drafts(*talk.rows)
        talk.step(*talk.rows)
        talk.check_drafts(talk.rows[0])


#: Kinds with windows of 16 tokens: in some layers, in all, and beside recurrent layers.
WINDOWED = [
    kind if kind in ("gemma3_text", "gpt_oss") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in (
        *("gemma3_text", "gpt_oss", "gemma3n", "gemma4_text", "llama_sliding", "ministral3", "step3p5"),
        *("baichuan_m1", "recurrent_gemma"),
    )
]


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_rows_on_both_sides_of_a_window_check_drafts_as_they_do_alone(kind: str, steps: int) -> None:
    with talking(kind, [tokens(1, 32), tokens(2, 8), tokens(3, 13)]) as talk:
        talk.prefill(*talk.rows)
        for most in (4, 2):
            for _ in range(steps):  # the ring of the longest row turns
                talk.step(*talk.rows)
            talk.check_drafts(*talk.rows, most=most)


@pytest.mark.parametrize("kind", WINDOWED)
def test_prompts_whose_tokens_were_stepped_go_on_in_chunks_together(kind: str) -> None:
    model, prompts = shared_model(kind), [tokens(1, 44), tokens(2, 28)]
    cache = PrefixCache(model)
    with cache.begin_many(prompts, capacity=500) as group:
        for row, count in zip(group.rows, (24, 8), strict=True):
            group.prefill(model, row, count)
        for _ in range(3):
            group.step(model, group.rows, [row.prompt[row.position] for row in group.rows])
        logits = dict(group.prefill_many(model, group.rows, 9))
        logits |= dict(group.prefill_many(model, group.rows))
        for row, prompt in zip(group.rows, prompts, strict=True):
            assert error(logits[row][0, -1], cold(model, prompt)) < ROUNDING
    for prompt in prompts:
        resumed(cache, model, [*prompt, 7])


def test_rows_whose_states_differ_in_shape_step_one_by_one() -> None:
    """longcat_flash_ngram keeps the last token ids: one of them behind the first token, then two."""
    model, cache = shared_model("longcat_flash_ngram"), PrefixCache(shared_model("longcat_flash_ngram"))
    texts = [[5, 6, 7, 8], [9]]
    with cache.begin_many(texts, capacity=400) as group:
        for row in group.rows:
            prefilled(group, model, row)
        for token in (1, 2):
            logits = group.step(model, group.rows, [token, token])
            for text, found in zip(texts, logits, strict=True):
                text.append(token)
                assert error(found[-1], cold(model, text)) < ROUNDING
    cache.check()


@pytest.mark.parametrize("prompt", [[7], [7, 8, 9]])
def test_a_row_steps_its_prompt_beside_a_row_that_evaluates_rejected_tokens_again(prompt: list[int]) -> None:
    model, cache = shared_model("qwen3_next"), PrefixCache(shared_model("qwen3_next"))
    with cache.begin_many([tokens(1, 5)], capacity=400) as group:
        owing = group.rows[0]
        group.prefill(model, owing)
        group.check_drafts(model, [owing], [[9, 10, 11]], lambda _: [1])
        fresh = group.admit(prompt)
        logits = group.step(model, [owing, fresh], [12, 7])
        assert owing.owed_tokens == 0
        assert (fresh.position, fresh.known_tokens) == (1, len(prompt))
        assert error(logits[0, -1], cold(model, [*tokens(1, 5), 9, 12])) < ROUNDING
        assert error(logits[1, -1], cold(model, [7])) < ROUNDING
        group.check()
    cache.check()


@pytest.mark.parametrize(("kind", "share"), [("llama", 2.11), ("qwen3_next", 2.69)])
def test_a_row_that_needs_room_leaves_those_that_were_checked_before_it_as_they_are(kind: str, share: float) -> None:
    """On a budget of so many rows of 100 tokens, three rows are sometimes checked one by one."""
    model, chosen = shared_model(kind), random.Random(1)
    texts = [tokens(1, 20), tokens(2, 31), tokens(3, 24)]
    with known(model, int(share * row_bytes(model, 100))).begin_many(texts, capacity=3000) as group:
        for row in group.rows:
            prefilled(group, model, row)
        batches = set()
        for _ in range(40):
            drafts = [[chosen.randint(1, 200) for _ in range(chosen.randint(1, 6))] for _ in texts]
            kept = [chosen.randint(1, len(its)) for its in drafts]
            group.check_drafts(model, group.rows, drafts, lambda _, counts=kept: counts)
            texts = [[*text, *its[:count]] for text, its, count in zip(texts, drafts, kept, strict=True)]
            group.check()
            batches.add(len({id(row.batch) for row in group.rows}))
        assert batches == {1, 3}
        assert [row.known.ids().tolist() for row in group.rows] == texts
        for text, its in zip(texts, group.step(model, group.rows, [5] * 3), strict=True):
            assert error(its[0], cold(model, [*text, 5])) < ROUNDING


@pytest.mark.parametrize("share", [0.2, 1, 50])
def test_a_row_that_is_closed_while_drafts_are_decided_leaves_the_others_as_they_are(share: float) -> None:
    model, texts = shared_model("llama"), [tokens(1, 20), tokens(2, 31), tokens(3, 24)]
    with known(model, int(share * row_bytes(model, 100))).begin_many(texts, capacity=3000) as group:
        for row in group.rows:
            prefilled(group, model, row)

        def accept(_: mx.array) -> list[int]:
            group.rows[1].close()
            return [1, 2, 2]

        group.check_drafts(model, group.rows, [[1, 2, 3], [4, 5, 6], [7, 8]], accept)
        for text, its in zip(([*texts[0], 1], [*texts[2], 7, 8]), group.step(model, group.rows, [5] * 2), strict=True):
            assert error(its[0], cold(model, [*text, 5])) < ROUNDING


@pytest.mark.parametrize("kind", FAST[:3])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_model_says_what_it_says_alone_and_leaves_nothing_in_the_rows(kind: str, rows: int) -> None:
    """Behind rejected tokens, in batches with holes, and with windows that wrap while it runs ahead."""
    model, draft = shared_model(kind), tiny_model(kind, seed=1)
    cache = PrefixCache(model, caches=lambda: [*make_prompt_cache(model), *make_prompt_cache(draft)])
    prompts = [tokens(seed, 20 + seed) for seed in range(rows)]
    with cache.begin_many(prompts, capacity=800) as group:
        both = group.with_draft_model(model, draft)
        with pytest.raises(ValueError, match="row 0: 20 tokens of its prompt are left; prefill it first"):
            group.draft(both, group.rows, [1] * rows, 2)
        talk = Talk(group, both, model)
        talk.prefill(*talk.rows)
        for most in (4, 1, 6, 4):
            talk.check_drafts(*group.rows, most=most)
            for count in (1, 5):
                before = [row.position for row in group.rows]
                found = group.draft(both, group.rows, [talk.next[row] for row in group.rows], count)
                assert [row.position for row in group.rows] == before
                group.check()
                for row, (its, chances) in zip(group.rows, found, strict=True):
                    if not row.owed_tokens:
                        assert its == likeliest(draft, [*talk.texts[row], talk.next[row]], count)
                    assert all(0 < each <= 1 for each in chances)
            talk.step(*group.rows)
            if most == 1 and rows == 3:
                group.rows[1].close()
        talk.check()


def likeliest(model: Any, text: list[int], count: int) -> list[int]:
    """The tokens that a model says next."""
    text, start = [*text], len(text)
    for _ in range(count):
        text.append(int(mx.argmax(model(mx.array([text]), cache=make_prompt_cache(model))[0, -1])))
    return text[start:]


def test_rows_that_draft_nothing_are_aligned_again() -> None:
    """Rows that end in different columns write one by one and need a mask; after some plain steps they need neither."""
    with talking("llama", [tokens(1, 20), tokens(2, 20)]) as talk:
        talk.prefill(*talk.rows)
        talk.keep(talk.rows, [[1, 2, 3], [4]], lambda _: [3, 1])
        assert not talk.rows[0].batch.columns.is_aligned
        for _ in range(4):
            talk.step(*talk.rows)
        assert talk.rows[0].batch.columns.is_aligned


def test_a_check_copies_no_tail() -> None:
    with talking("llama", [tokens(1, 20), tokens(2, 20)]) as talk:
        talk.prefill(*talk.rows)
        talk.step(*talk.rows)
        batch = talk.rows[0].batch
        for drafts, kept in (([[1, 2, 3], [4]], [1, 1]), ([[1, 2], [4, 5]], [2, 1]), ([[1], [4, 5, 6]], [1, 3])):
            talk.keep(talk.rows, drafts, lambda _, kept=kept: kept)
            assert [row.batch for row in talk.rows] == [batch, batch]
            assert batch.columns.end <= 20 + 1 + 2 + 3 + 3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_caller_that_fails_leaves_the_rows_in_front_of_the_check(kind: str) -> None:
    def fail(logits: mx.array) -> list[int]:
        raise LookupError("refused")

    with talking(kind, [tokens(1, 20), tokens(2, 23)]) as talk:
        talk.prefill(*talk.rows)
        talk.check_drafts(*talk.rows)
        positions = [(row.position, row.known_tokens) for row in talk.rows]
        with pytest.raises(LookupError, match="refused"):
            talk.keep(talk.rows, [[3, 4], [5, 6, 7]], fail)
        assert [(row.position, row.known_tokens) for row in talk.rows] == positions
        talk.step(*talk.rows)
        talk.check_drafts(*talk.rows)


def test_what_cannot_be_checked_is_refused_and_changes_nothing() -> None:
    with talking("llama", [tokens(1, 20), tokens(2, 23)], capacity=120) as talk:
        group, model, (first, second) = talk.group, talk.model, talk.rows
        whole: dict[str, Any] = {"accept": lambda logits: [1] * len(logits)}
        with pytest.raises(ValueError, match="20 tokens of its prompt are left"):
            group.check_drafts(model, [first], [[1, 2]], **whole)
        talk.prefill(first, second)
        for drafts, found in (
            ([[1]], "tokens of 1 rows; wanted those of 2"),
            ([[1], []], "tokens is empty"),
            ([[1], [256]], "wanted a token id"),
            ([[1] * 65, [2]], "a check of 65 tokens of a row; wanted at most 64"),
        ):
            with pytest.raises(ValueError, match=found):
                group.check_drafts(model, [first, second], drafts, **whole)
        for counts in ([0, 1], [1, 3], [1]):
            with pytest.raises(ValueError, match="accept keeps"):
                group.check_drafts(model, [first, second], [[1, 2], [3, 4]], lambda _, its=counts: its)
        with pytest.raises(CacheFullError):
            group.check_drafts(model, [first, second], [[1] * 60, [2] * 60], **whole)
        assert (first.position, second.position) == (20, 23)
        talk.check_drafts(first, second)
