"""Drafting: the best source wins, the pace says how many, and what became of it is counted."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from radixcache.speculate.drafting import (
    IDLE_LOOKS,
    IDLE_TOKENS,
    LOOK_TOKENS,
    Drafting,
    PredictionSource,
    PromptSource,
    TreeSource,
    predicted_tokens,
)
from radixcache.speculate.pace import HOPED_SHARE, LOOK_SHARE, DraftPace, Proposal
from radixcache.speculate.suffix_index import TAIL_TOKENS, SuffixIndex


def free(rows: int, tokens_in_pass: int) -> float:
    """Each token more costs a hundredth of a pass."""
    return 1 + tokens_in_pass / 100


def steep(rows: int, tokens_in_pass: int) -> float:
    """A pass over two tokens costs twice as much as one over one."""
    return float(tokens_in_pass)


def spoken(reply: list[int], drafting: Drafting) -> int:
    """Passes that it takes to say a reply; the first pass of all gives its first token."""
    drafting.advance(reply[:1])
    at, passes = 1, 0
    while at < len(reply):
        proposal = drafting.propose()
        proposed = () if proposal is None else proposal.tokens
        accepted = 0
        while accepted < len(proposed) and reply[at : at + accepted + 1] == [*proposed[: accepted + 1]]:
            accepted += 1
        drafting.advance(reply[at : at + accepted + 1], accepted)
        drafting.check()
        at, passes = at + accepted + 1, passes + 1
    return passes


def test_a_reply_that_was_said_before_takes_few_passes() -> None:
    index = SuffixIndex(1 << 20)
    reply = list(range(100, 200))
    index.add([1, 2, 3, *reply])
    drafting = Drafting([TreeSource(index)], DraftPace(free), [1, 2, 3])
    assert spoken(reply, drafting) < 15
    counts = drafting.drafted["tree"]
    assert counts.accepted > 80
    assert counts.proposed >= counts.accepted


def test_nothing_is_proposed_where_a_token_more_costs_a_pass() -> None:
    index = SuffixIndex(1 << 20)
    reply = list(range(100, 200))
    index.add([1, 2, 3, *reply])
    drafting = Drafting([TreeSource(index)], DraftPace(steep), [1, 2, 3])
    assert spoken(reply, drafting) == 99
    assert drafting.drafted == {}


def test_a_reply_that_repeats_its_prompt_and_itself_is_proposed_from_there() -> None:
    prompt = list(range(50))
    for reply in ([200, 201, *range(10, 40)], [*range(100, 130), 99, *range(100, 130)]):
        drafting = Drafting([PromptSource(prompt)], DraftPace(free), prompt)
        assert spoken(reply, drafting) < len(reply) * 0.7


def test_no_look_indexes_more_than_a_part_of_a_long_prompt() -> None:
    prompt = [(each * each) % 30_011 for each in range(2 * LOOK_TOKENS + 100)]
    source, reply = PromptSource(prompt), [7, 8, 9]
    places = (LOOK_TOKENS - 20, 2 * LOOK_TOKENS - 20, len(prompt) - 20)
    for looks, place in enumerate(places):
        assert source.propose(prompt[place - 16 : place], 4).tokens == tuple(prompt[place : place + 4])
        for later in places[looks + 1 :]:
            assert PromptSource(prompt).propose(prompt[later - 16 : later], 4).tokens == ()
        source.extend(reply)
    source.propose([*reply, *reply], 4)
    assert source.propose([*prompt[-16:], 7], 4).tokens[:2] == (8, 9)


def test_what_a_reply_said_while_looks_were_rare_is_found_when_it_comes_again() -> None:
    source, said = PromptSource([1, 2, 3]), list(range(100, 400))
    for at in range(0, len(said), 8):
        source.extend(said[at : at + 8])
        assert source.propose(said[: at + 8], 4).tokens == ()
    assert source.propose(said[40:60], 4).tokens == (160, 161, 162, 163)
    source.extend(said[40:60])
    assert source.propose(said[50:60], 4).tokens == (160, 161, 162, 163)  # in what was found, nothing waits


def test_the_newest_tokens_of_a_reply_are_found_although_it_is_indexed_in_batches() -> None:
    source = PromptSource([1, 2, 3])
    for token in range(100, 130):
        source.extend([token])
        assert source.propose([token - 1, token], 4).tokens == ()
    assert source.propose([1, 2], 3).tokens == (3, 100, 101)
    for token in (130, 131, 130, 131):
        source.extend([token])
    assert source.propose([130, 131], 4).tokens == (130, 131)


class Counting:
    """A source that knows nothing until a token, and one text from there on; counts how often it is asked."""

    name = "tree"

    def __init__(self, text: Sequence[int] = ()) -> None:
        self.text, self.asked = list(text), 0

    def propose(self, tail: Sequence[int], limit: int) -> Proposal:
        self.asked += 1
        at = self.text.index(tail[-1]) + 1 if tail[-1] in self.text else len(self.text)
        tokens = tuple(self.text[at : at + limit])
        return Proposal(tokens, (0.9,) * len(tokens), self.name, 8)

    def extend(self, tokens: Sequence[int]) -> None:
        pass


def fast(rows: int, tokens_in_pass: int) -> float:
    """A pass takes a millisecond, so looks are as rare as they become."""
    return free(rows, tokens_in_pass) / 1000


def test_what_a_rare_look_finds_is_proposed_behind_the_next_token() -> None:
    source = Counting(range(1000, 1100))
    drafting = Drafting([source], DraftPace(fast), [0])
    for token in range(1, 200):  # nothing is known of these
        assert not drafting.candidate().tokens
        drafting.advance([token])
    assert IDLE_TOKENS < source.asked < 50
    drafted = 0
    for token in range(1000, 1020):
        if drafting.candidate().tokens:  # as one user's reply is decoded: asked before the token is read
            drafting.advance([token])
            proposal = drafting.propose()
            assert proposal is not None
            assert proposal.tokens[0] == token + 1
            drafted += 1
            break
        drafting.advance([token])
    assert drafted == 1


def test_looks_are_rare_from_the_start_where_no_reply_gained_lately() -> None:
    pace = DraftPace(fast)

    def looks(source: Counting, count: int) -> int:
        drafting, before = Drafting([source], pace, [0]), source.asked
        for token in range(1, count + 1):
            drafting.propose()
            drafting.advance([token])
        return source.asked - before

    assert looks(Counting(), 16) == 16
    for _ in range(10):
        looks(Counting(), 16)
    assert looks(Counting(), 33) == 2  # of 0.2 ms each, beside passes of 1 ms: a row waits for the most, 32 tokens
    found = Drafting([Counting([0, 1, 2, 3])], pace, [0])
    assert found.propose() is not None
    found.advance([1, 2, 3, 4], 3)
    assert looks(Counting(), 16) == 16


def test_looks_take_a_small_share_of_the_time_of_passes_however_short_replies_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pace, now_s, looked_s = DraftPace(), 0.0, 0.003  # what indexing a prompt takes

    def clock() -> float:
        nonlocal now_s
        now_s += looked_s
        return now_s

    monkeypatch.setattr("radixcache.speculate.drafting.perf_counter", clock)
    source, passes = Counting(), 30_000
    for reply in range(passes // 10):
        drafting = Drafting([source], pace, [0])
        for token in range(10):
            pace.note(1, 0.001)
            drafting.propose()
            drafting.advance([10 * reply + token])
    free, most_s = IDLE_LOOKS, passes * 0.001 * LOOK_SHARE
    assert most_s * 0.9 < (source.asked - free) * looked_s <= most_s + looked_s


def test_what_is_found_and_never_worth_a_pass_does_not_keep_looks_frequent() -> None:
    source = Counting(range(1000))
    drafting = Drafting([source], DraftPace(lambda rows, tokens_in_pass: tokens_in_pass / 1000), [0])
    for token in range(1, 400):
        assert drafting.propose() is None
        drafting.advance([token])
    assert source.asked < 16 + 2 * 400 / 10


def test_a_prediction_is_followed_and_found_again_behind_an_edit() -> None:
    predicted = list(range(100, 160))
    reply = [*range(100, 120), 7, 8, *range(122, 160)]
    drafting = Drafting([PredictionSource(predicted)], DraftPace(free), [1, 2, 3])
    assert spoken(reply, drafting) < 20


def test_a_look_indexes_a_part_of_a_long_prediction_and_all_of_it_is_found_in_the_end() -> None:
    predicted, looks = list(range(10 * LOOK_TOKENS)), 0
    source = PredictionSource(predicted)
    source.extend([-5])
    while not source.propose(predicted[-8:-3], 8).tokens:
        looks += 1
        assert source._index.tokens <= looks * (LOOK_TOKENS + TAIL_TOKENS)
    assert looks == 9
    assert source.propose(predicted[-8:-3], 8).tokens == (*predicted[-3:],)


def test_of_a_predicted_text_little_more_is_tokenized_than_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixcache.speculate.drafting.PIECE_CHARACTERS", 10)
    seen = list[str]()

    class Characters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            seen.append(text)
            return [*map(ord, text)]

    text = "abcdefghij" * 100
    assert predicted_tokens(text, Characters(), 25) == [*map(ord, text[:25])]
    assert sum(map(len, seen)) == 30
    assert predicted_tokens(text, Characters(), None) == [*map(ord, text)]


def test_the_source_that_expects_more_tokens_wins() -> None:
    index = SuffixIndex(1 << 20)
    index.add([1, 2, 3, 4])
    drafting = Drafting([TreeSource(index), PredictionSource([5, 6, 7, 8])], DraftPace(free), [1, 2, 3])
    proposal = drafting.propose()
    assert proposal is not None
    assert proposal.source == "prediction"


def test_the_time_of_a_pass_is_learned_and_decides() -> None:
    pace = DraftPace()
    sure = Proposal((1,) * 8, (0.9,) * 8, "tree", 8)
    assert pace.length([sure]) == [0]
    pace.note(1, 0.010)
    assert pace.length([sure]) == [8]  # not measured yet: hoped to be cheap
    for _ in range(20):
        pace.note(1, 0.010)
        pace.note(2, 0.020)
        pace.note(4, 0.040)
        pace.note(8, 0.080)
        pace.note(16, 0.160)
        pace.check()
    assert pace.length([sure]) == [0]
    for _ in range(60):
        for width in (2, 4, 8, 16):
            pace.note(width, 0.011)
    assert pace.length([sure]) == [8]


def test_a_width_that_was_slow_is_tried_again_but_seldom() -> None:
    pace = DraftPace()
    sure = Proposal((1,) * 8, (0.9,) * 8, "tree", 8)
    tried = 0
    for _ in range(4000):
        (count,) = pace.length([sure])
        pace.note(1 + count, 0.01 * (1 + count))
        tried += count > 0
        pace.check()
    assert 10 < tried < 40


def test_a_first_pass_that_was_slow_once_is_no_measurement() -> None:
    pace = DraftPace()
    sure = Proposal((1,) * 8, (0.95,) * 8, "tree", 8)
    pace.note(1, 0.01)
    pace.note(9, 1.0)  # compiled, or paged in
    for _ in range(200):
        (count,) = pace.length([sure])
        pace.note(1 + count, 0.01 + 0.0001 * count)
    assert count == 8


@pytest.mark.parametrize("cost", [0.15, 0.3])
def test_noisy_times_cost_little_of_what_drafting_gains(cost: float) -> None:
    """Times vary by a fifth, and one in fifty is five times as long: most of the gain of known times is left."""
    draw, gained, most = random.Random(1), 0.0, 0.0
    known, pace = DraftPace(lambda rows, width: 1 + cost * (width - 1)), DraftPace()
    for _ in range(4000):
        proposal = Proposal((1,) * 8, (draw.choice([0.4, 0.7, 0.9]),) * 8, "tree", 8)
        (best,), (count,) = known.length([proposal]), pace.length([proposal])
        slow = 5 if draw.random() < 0.02 else 1
        pace.note(1 + count, 0.01 * known.seconds(1 + count) * math.exp(draw.gauss(0, 0.2)) * slow)
        most += (1 + proposal.first(best).expected()) / known.seconds(1 + best) - 1
        gained += (1 + proposal.first(count).expected()) / known.seconds(1 + count) - 1
    assert gained > 0.9 * most


def test_a_pace_expects_tokens_beyond_all_that_it_measured_to_be_cheap() -> None:
    pace = DraftPace()
    pace.note(1, 1.0)
    assert pace.seconds(2) < 1.05
    for _ in range(30):
        pace.note(1, 1.0)
        pace.note(2, 1.5)
    assert pace.seconds(2) == pytest.approx(1.5, rel=0.05)
    assert pace.seconds(9) == pytest.approx(1.5 + 7 * HOPED_SHARE, rel=0.05)


@pytest.mark.parametrize("chance", [0.9, 0.98])
def test_a_pace_finds_the_fastest_width_where_a_few_tokens_cost_most_of_what_many_cost(chance: float) -> None:
    """Seconds of passes of a model on a CPU, whose kernels work on eight tokens at a time."""
    widths, times = (1, 5, 8, 9, 14, 17, 25, 32), (0.082, 0.142, 0.165, 0.215, 0.25, 0.29, 0.33, 0.365)

    def rate(length: int | None) -> float:
        drawn, pace, tokens, took_s = random.Random(1), DraftPace(), 0, 0.0
        for step in range(200):
            proposal = pace.corrected(Proposal((1,) * 31, (0.85,) * 31, "tree", kinds=(0,) * 31))
            count = pace.length([proposal])[0] if length is None else length
            accepted = next((at for at in range(count) if drawn.random() >= chance), count)
            seconds = float(np.interp(1 + count, widths, times))
            pace.note(1 + count, seconds)
            pace.note_accepted(proposal.first(count), accepted)
            tokens, took_s = tokens + 1 + accepted * (step >= 20), took_s + seconds * (step >= 20)
        return tokens / took_s

    assert rate(None) > 0.93 * max(map(rate, range(32)))


def test_a_draft_model_is_asked_as_long_as_it_saves_time_and_again_later() -> None:
    pace, plain_s = DraftPace(), 0.010
    for _ in range(20):
        pace.note(1, plain_s, 2)
    assert pace.best([pace.guess(3, 2)] * 2, 2)[1] == 3  # not asked yet: hoped to be right and fast

    def asked(rounds: int, draft_s: float, probability: float) -> int:
        """In how many of these rounds it is asked; it is right as often as it says."""
        count = 0
        for _ in range(rounds):
            its = pace.best([pace.guess(3, 2)] * 2, 2)[1]
            if its:
                count += 1
                proposals = [pace.of_model([1] * its, [probability] * its)] * 2
                pace.note_drafted(proposals, its, its * draft_s, 2)
                for proposal in proposals:
                    pace.note_accepted(proposal, its if probability == 1.0 else 0)
            pace.note(1 + its, plain_s * (1 + its / 100), 2)
            pace.note(1, plain_s, 2)
            pace.check()
        return count

    assert asked(200, 0.001, 1.0) == 200
    assert asked(200, 0.010, 1.0) < 60  # as slow as the model
    assert asked(4000, 0.010, 1.0) < 80  # some times, whatever became of it
    assert asked(400, 0.001, 1.0) > 200
    assert asked(400, 0.001, 0.05) < 60
    assert asked(4000, 0.001, 0.05) < 200


def test_chances_are_corrected_by_what_was_accepted() -> None:
    pace = DraftPace(free)
    proposal = Proposal((1, 2), (0.9, 0.9), "tree", 8)
    for _ in range(50):
        pace.note_accepted(proposal, 0)
    assert max(pace.corrected(proposal).chances) < 0.2
    other = proposal._replace(source="prompt")
    assert pace.corrected(other).chances == pytest.approx(other.chances)
    pace.check()


def test_all_rows_pay_for_the_widest() -> None:
    long, short = Proposal((1,) * 8, (0.95,) * 8, "tree", 16), Proposal((1,), (0.5,), "tree", 3)
    pace = DraftPace(lambda rows, width: 1 + rows * width / 20)
    assert pace.length([long, short], rows=2) == [8, 1]
    alone = pace.length([long], rows=16)[0]
    assert alone < 8  # fifteen rows would pay for the proposal of one
    assert pace.length([short], rows=16) == [0]
