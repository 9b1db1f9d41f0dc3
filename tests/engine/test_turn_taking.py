"""Nobody is starved: neither a long prompt by short ones nor the other way round, and nobody is overtaken for room."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.generator import AdmissionQueue


def request(number, prompt_left=0):
    row = SimpleNamespace(prompt_left=prompt_left)
    return SimpleNamespace(number=number, row=row, go_back=lambda: None)


def served(arrivals, chunk=10):
    """Hand out chunks; `arrivals` says how many tokens come in before each. Returns who got each chunk."""
    turns, prefilling, order, waiting, number = AdmissionQueue(100, 8, None, 10), [], [], list(arrivals), 0
    while waiting or prefilling:
        for tokens in waiting.pop(0) if waiting else ():
            prefilling.append(request(number, tokens))
            number += 1
        if prefilling:
            chosen = turns.next_chunk(prefilling)
            chosen.row.prompt_left -= chunk
            order.append(chosen.number)
            prefilling = [each for each in prefilling if each.row.prompt_left > 0]
    return order


def test_chunks_go_to_the_first_and_to_the_shortest_in_turn():
    assert served([[35]]) == [0, 0, 0, 0]
    assert served([[100], [10]])[:3] == [0, 1, 0]
    assert served([[30, 30, 30]]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert served([[100], *([[10]] * 40)])[:20].count(0) == 10


@given(st.lists(st.lists(st.integers(1, 120), max_size=3), max_size=25))
def test_a_prompt_is_through_after_twice_its_own_chunks_and_those_before_it(arrivals):
    order = served(arrivals)
    came = [(tick, tokens) for tick, group in enumerate(arrivals) for tokens in group]
    chunks = [-(-tokens // 10) for _, tokens in came]
    assert sorted(order) == [number for number, count in enumerate(chunks) for _ in range(count)]
    # Idle ticks hand out nothing, so a place in `order` is at most a tick of the schedule.
    for number, (tick, _) in enumerate(came):
        before = len(order) - order[::-1].index(number)
        assert before - min(tick, before) <= 2 * sum(chunks[: number + 1]) + 1


class Queue(AdmissionQueue):
    def __init__(self, waiting, fitting, gaining):
        super().__init__(100, 8, None, 10)
        self.waiting, self._fitting, self._gaining = waiting, fitting, gaining

    def _fits(self, sequence, group):
        return sequence in self._fitting

    def _gains(self, sequence, group):
        return sequence in self._gaining


@pytest.mark.parametrize(
    ("waiting", "fitting", "gaining", "chosen"),
    [
        ([], [], [], None),
        (["a", "b"], ["a", "b"], [], "a"),
        (["large", "small"], ["small"], [], None),
        (["same", "other"], ["same", "other"], ["same"], "other"),
        (["same", "large", "small"], ["same", "small"], ["same"], None),
    ],
)
def test_what_does_not_fit_is_not_overtaken_and_who_waits_to_share_lets_others_pass(waiting, fitting, gaining, chosen):
    assert Queue(waiting, fitting, gaining).next(None) == chosen


def test_a_request_that_is_sent_back_waits_in_front_of_later_ones():
    queue = AdmissionQueue(capacity=100, max_rows=2, context=None, step_size=10)
    first, second, third = requests = [request(number) for number in range(3)]
    queue.waiting.extend(requests)
    queue.start(first, row=None)
    queue.start(second, row=None)
    queue.send_back(second)
    assert (queue.running, queue.waiting) == ([first], [second, third])
