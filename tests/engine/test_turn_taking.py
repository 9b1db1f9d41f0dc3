"""Nobody is starved: neither a long prompt by short ones nor the other way round, and nobody is overtaken for room."""

from dataclasses import dataclass
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from runner.engine.engine import AdmissionQueue


@dataclass
class Prompt:
    number: int
    remaining_tokens: int


def served(arrivals, chunk=10):
    """Hand out chunks; `arrivals` says how many tokens come in before each. Returns who got each chunk."""
    turns, prefilling, order, waiting, number = AdmissionQueue(100, 8, None, 10), [], [], list(arrivals), 0
    while waiting or prefilling:
        if waiting:
            for tokens in waiting.pop(0):
                prefilling.append(Prompt(number, tokens))
                number += 1
        if prefilling:
            chosen = turns.next_chunk(prefilling)
            chosen.remaining_tokens -= chunk
            order.append(chosen.number)
            prefilling = [each for each in prefilling if each.remaining_tokens > 0]
    return order


def test_one_prompt_gets_every_chunk():
    assert served([[35]]) == [0, 0, 0, 0]


def test_a_short_prompt_has_not_to_wait_for_a_long_one():
    assert served([[100], [10]])[:3] == [0, 1, 0]


def test_a_long_prompt_gets_every_second_chunk_whatever_comes_meanwhile():
    order = served([[100], *([[10]] * 40)])
    assert order[:20].count(0) == 10


def test_equal_prompts_that_come_together_are_served_one_after_the_other():
    assert served([[30, 30, 30]]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@given(st.lists(st.lists(st.integers(1, 120), max_size=3), max_size=25))
def test_a_prompt_is_through_after_twice_its_own_chunks_and_those_before_it(arrivals):
    order = served(arrivals)
    came = [(tick, tokens) for tick, group in enumerate(arrivals) for tokens in group]
    chunks = [-(-tokens // 10) for _, tokens in came]
    assert sorted(order) == [number for number, count in enumerate(chunks) for _ in range(count)]
    # Idle ticks hand out nothing, so a place in `order` is at most a tick of the schedule.
    for number, (tick, _) in enumerate(came):
        last = len(order) - 1 - order[::-1].index(number)
        before = sum(1 for each in order[: last + 1])
        served_before_arrival = min(tick, before)
        assert before - served_before_arrival <= 2 * sum(chunks[: number + 1]) + 1


class Queue(AdmissionQueue):
    def __init__(self, waiting, fitting, gaining):
        super().__init__(100, 8, None, 10)
        self.waiting, self._fitting, self._gaining = waiting, fitting, gaining

    def _fits(self, sequence, group):
        return sequence in self._fitting

    def _gains(self, sequence, group):
        return sequence in self._gaining


def choose(waiting, fitting=(), gaining=()):
    return Queue(waiting, fitting, gaining).next(None)


def test_the_first_that_waits_comes_in_first():
    assert choose(["a", "b"], fitting=["a", "b"]) == "a"


def test_what_does_not_fit_is_not_overtaken_by_what_does():
    assert choose(["large", "small"], fitting=["small"]) is None


def test_who_waits_to_share_lets_the_others_pass():
    assert choose(["same", "other"], fitting=["same", "other"], gaining=["same"]) == "other"
    assert choose(["same", "large", "small"], fitting=["same", "small"], gaining=["same"]) is None


def test_nobody_waits_where_nobody_is():
    assert choose([]) is None


def test_a_request_that_is_sent_back_waits_in_front_of_later_ones():
    admission = AdmissionQueue(capacity=100, max_rows=2, context=None, step_size=10)
    first, second, third = requests = [SimpleNamespace(number=number, go_back=lambda: None) for number in range(3)]
    admission.waiting.extend(requests)
    admission.start(first, row=None)
    admission.start(second, row=None)
    admission.send_back(second)
    assert (admission.running, admission.waiting) == ([first], [second, third])
