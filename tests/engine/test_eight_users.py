"""Eight users at once, with drafts, over all kinds of layers: greedy replies are those of each alone without drafts.

Prompts are on both sides of the tiny kinds' windows. Where the two best tokens are nearly equal, rounding may choose
the other one: such replies are counted, and there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from radixcache import stream_generate
from runner.models.load import LoadedModel
from runner.models.tiny import TINY_KINDS
from runner.models.tiny import WINDOW_LENGTH as W
from tests.engine.generators import (
    Doubtful,
    alone,
    cache_of_both,
    free_cache,
    load,
    new_generator,
    serve,
    tokens_of,
)
from tests.groups.cold import cold
from tests.prompts import tokens

LENGTH = 20
ALONE = ("llama4", "deepseek_v41")  # groups refuse them
KINDS = [kind if kind == "gpt_oss" else pytest.param(kind, marks=pytest.mark.slow) for kind in TINY_KINDS]
_SAID = tokens(9, 7)  # what comes again in each prompt, so that the prompt itself is a source of drafts
PROMPTS = [
    [*tokens(seed, length), *_SAID, *tokens(seed + 8, 2), *_SAID[:4]]
    for seed, length in enumerate((1, 3, W - 10, W - 2, W, 2 * W - 8, 2 * W, 3 * W))
]
#: The least difference of the two best logits at which a choice is one.
CLEAR = 1e-3


def parted(loaded: LoadedModel, prompt: Sequence[int], found: Sequence[int]) -> bool:
    """Whether a reply is another one than that of the prompt alone; where the two part, the choice was no clear one."""
    wanted = alone(loaded, prompt, LENGTH)
    if tuple(found) == wanted:
        return False
    at = next(at for at, (ours, theirs) in enumerate(zip(found, wanted, strict=True)) if ours != theirs)
    first, second = np.sort(np.array(cold(loaded.model, [*prompt, *wanted[:at]])))[-1:-3:-1]
    assert first - second < CLEAR, (at, found, wanted)
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["tree", "prompt", "draft"])
def test_greedy_replies_of_eight_users_with_drafts_are_those_of_each_alone_without(kind: str, source: str) -> None:
    loaded = load(kind)
    draft: Any = Doubtful(kind) if source == "draft" else None
    cache = free_cache(loaded) if draft is None else cache_of_both(loaded, draft)
    speculate = None if source == "draft" else source
    others, checked, is_drafted = 0, 0, source != "prompt"  # a random model seldom says what the prompt has
    if kind in ALONE:  # as the server does
        for prompt in [*PROMPTS, *PROMPTS] if source == "tree" else PROMPTS:
            replies = stream_generate(
                loaded.model, loaded.tokenizer, prompt, LENGTH, draft, cache=cache, speculate=speculate
            )
            found = [*replies]
            checked += sum(each.proposed for each in found[-1].drafted.values())
            others += parted(loaded, prompt, [each.token for each in found])
    else:
        with new_generator(loaded, cache, capacity=4096, speculate=speculate, draft_model=draft) as generator:
            is_drafted &= generator.group.drafts_together(loaded.model)  # else drafts are for one at a time
            for _ in range(2):  # what was said in the first turn is in the tree in the second one
                tickets = serve(generator, PROMPTS, LENGTH, marks=())
                others += sum(
                    parted(loaded, prompt, tokens_of(each)) for prompt, each in zip(PROMPTS, tickets, strict=True)
                )
                checked += sum(its.proposed for each in tickets for its in each.facts.drafted.values())
    cache.check()
    assert checked >= 8 or not is_drafted, checked
    assert others <= 1
    mx.clear_cache()
