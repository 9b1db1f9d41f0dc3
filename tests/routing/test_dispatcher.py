"""The dispatcher: what it is told, what it is sent, what it decides."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.routing.dispatcher import HALF_LIFE_S, Choice, Directory, Dispatcher
from runner.routing.routers import ROUTERS, UNEVEN, Ask, Coefficients, RoutingRates, View, make_router, weighed_s

#: A token takes a second to prefill, and nothing to decode.
PLAIN = Coefficients(prefill_s=1.0, decode_s=0.0, output_tokens=1.0)
REPLICAS = ("a", "b", "c")


def dispatcher(name: str = "prefix", **more: int) -> Dispatcher:
    return Dispatcher(make_router(name), REPLICAS, rates=RoutingRates(PLAIN), block_tokens=10, **more)


def sent(to: Dispatcher, request: int, ask: Ask, now_s: float) -> Choice:
    choice = to.choose(ask, now_s)
    to.send(request, choice, now_s)
    return choice


def test_a_second_request_with_the_same_prefix_goes_where_the_first_one_went() -> None:
    tested = dispatcher()
    first = sent(tested, 1, Ask([1, 2, 3], 35), 0.0)
    tested.end(1, 35.0)
    second = sent(tested, 2, Ask([1, 2, 3, 4], 45), 36.0)
    assert (second.replica, second.matched_tokens, second.work_s) == (first.replica, 30, 15.0)


def test_a_full_directory_forgets_the_end_of_a_prefix_first() -> None:
    directory = Directory(max_digests=2)
    directory.add("a", [1, 2, 3])
    assert directory.matched_blocks("a", [1, 2, 3]) == 2


def chosen(ask: Ask, *views: View) -> str:
    return make_router("prefix").choose(ask, views, PLAIN).replica


@pytest.mark.parametrize(("waiting_s", "goes_to"), [(89.0, "a"), (91.0, "b")])
def test_a_prefix_is_left_once_waiting_for_it_takes_three_times_its_prefill(waiting_s: float, goes_to: str) -> None:
    views = View("a", waiting_s, 30, 50.0), View("b", 0.0, 0, 50.0)
    assert chosen(Ask([1, 2, 3], 40), *views) == goes_to


@pytest.mark.parametrize(
    ("waiting_s", "recent_s", "goes_to"), [(1.0, 190.0, "b"), (1.0, 110.0, "a"), (0.0, 900.0, "a")]
)
def test_a_replica_that_had_more_work_than_others_is_left_only_where_work_waits(
    waiting_s: float, recent_s: float, goes_to: str
) -> None:
    views = View("a", waiting_s, 20, recent_s), View("b", 0.0, 0, 100.0)
    assert chosen(Ask([1, 2], 20), *views) == goes_to


def test_what_nobody_has_goes_to_who_had_the_least_work_of_late() -> None:
    assert chosen(Ask([1], 10), View("a", 0.0, 0, 3.0), View("b", 0.0, 0, 2.0), View("c", 0.0, 0, 4.0)) == "b"


def test_work_counts_for_less_as_time_goes_by_and_for_what_it_turned_out_to_be() -> None:
    tested = dispatcher()
    tested.send(1, tested.choose(Ask([], 10), 0.0, ["a"]), 0.0)
    tested.send(2, tested.choose(Ask([], 10), 0.0, ["b"]), 0.0)
    tested.end(1, 10.0)
    tested.end(2, 10.0, work_s=30.0)
    recent_s = {view.replica: view.recent_s for view in tested.views(Ask([], 1), 10.0 + HALF_LIFE_S)}
    assert recent_s == pytest.approx({"a": 5.0, "b": 15.0, "c": 0.0}, rel=2e-3)


def test_a_replica_that_joins_is_taken_to_have_had_as_much_work_as_the_others() -> None:
    tested = dispatcher()
    for request, replica in enumerate(REPLICAS):
        tested.send(request, tested.choose(Ask([], 10 + 10 * request), 0.0, [replica]), 0.0)
    tested.join("d")
    assert {view.replica: view.recent_s for view in tested.views(Ask([], 1), 0.0)} == dict(
        zip("abcd", (10.0, 20.0, 30.0, 20.0), strict=True)
    )


def test_a_stale_digest_costs_a_miss_until_it_is_told_as_removed() -> None:
    tested = dispatcher()
    tested.tell("b", added=[1, 2, 3])
    assert tested.choose(Ask([1, 2, 3], 30), 0.0).matched_tokens == 30
    tested.tell("b", removed=[2])
    assert tested.choose(Ask([1, 2, 3], 30), 0.0)[:3:2] == ("b", 10)


def test_a_forgotten_replica_is_not_chosen_and_comes_back_empty() -> None:
    tested = dispatcher()
    tested.tell("c", added=[1])
    assert sent(tested, 1, Ask([1], 10), 0.0).replica == "c"
    tested.forget("c")
    assert tested.replicas == ["a", "b"]
    tested.end(1, 1.0)  # its request ends with an error, later
    tested.join("c")
    (view,) = tested.views(Ask([1], 10), 2.0, ["c"])
    assert view[:3] == ("c", 0.0, 0)


def test_what_the_first_open_request_has_had_by_now_is_not_waited_for() -> None:
    tested = dispatcher()
    tested.send(1, tested.choose(Ask([], 10), 0.0, ["a"]), 0.0)
    tested.send(2, tested.choose(Ask([], 10), 4.0, ["a"]), 4.0)
    waiting_s = [tested.views(Ask([], 1), now_s, ["a"])[0].waiting_s for now_s in (4.0, 7.0, 10.0, 99.0)]
    assert waiting_s == [16.0, 13.0, 10.0, 10.0]
    tested.end(1, 99.0)
    assert tested.views(Ask([], 1), 100.0, ["a"])[0].waiting_s == 9.0


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_among_those_that_can_take_it(name: str) -> None:
    tested = dispatcher(name)
    chosen = {tested.choose(Ask([index], 10), 0.0, ["b", "new"]).replica for index in range(50)}
    assert chosen <= {"b", "new"}
    with pytest.raises(ValueError, match="no replica to choose"):
        tested.choose(Ask([], 1), 0.0, [])


@pytest.mark.parametrize("name", ROUTERS)
def test_requests_without_anything_in_common_come_to_all_replicas(name: str) -> None:
    tested = dispatcher(name)
    went = [sent(tested, index, Ask([index], 10), 100.0 * index).replica for index in range(60)]
    assert set(went) == set(REPLICAS)
    assert went == [
        sent(again, index, Ask([index], 10), 100.0 * index).replica
        for again in [dispatcher(name)]
        for index in range(60)
    ]


def test_hash_moves_only_what_was_on_the_replica_that_is_gone() -> None:
    tested = dispatcher("hash")
    before = [tested.choose(Ask([index], 10), 0.0).replica for index in range(60)]
    tested.forget("b")
    after = [tested.choose(Ask([index], 10), 0.0).replica for index in range(60)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "b")


def test_hash_keeps_a_session_together_however_its_prompt_begins() -> None:
    tested = dispatcher("hash")
    assert len({tested.choose(Ask([index], 10, "ann"), 0.0).replica for index in range(20)}) == 1


def test_an_unknown_router_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match="no router 'best'; known: random, round-robin, hash, prefix"):
        make_router("best")


def test_rates_forget_what_was_measured_long_ago() -> None:
    rates = RoutingRates()
    rates.prefilled(1_000, 1.0)
    assert rates.now.prefill_s == 1e-3
    for _ in range(400):
        rates.prefilled(1_000, 4.0)
        rates.decoded(10, 0.5)
    assert rates.now.prefill_s == pytest.approx(4e-3, rel=1e-3)
    assert rates.now[1:] == pytest.approx((0.05, 10.0))
    assert rates.now.work_s(100) == pytest.approx(0.4 + 0.5, rel=1e-3)


class Walk(RuleBasedStateMachine):
    """Random prompts of a small tree through a dispatcher, beside plain sets of what each replica was said to have."""

    def __init__(self) -> None:
        super().__init__()
        self.tested = dispatcher(max_digests=12)
        self.plain: dict[str, set[int]] = {replica: set() for replica in REPLICAS}
        self.open: list[int] = []
        self.now_s = 0.0
        self.requests = 0

    @rule(path=st.lists(st.integers(1, 2), max_size=5), rest=st.integers(1, 9), after_s=st.floats(0, 50))
    def ask(self, path: list[int], rest: int, after_s: float) -> None:
        self.now_s += after_s
        digests = [int("".join(map(str, path[: end + 1]))) for end in range(len(path))]
        ask = Ask(digests, 10 * len(digests) + rest)
        views = self.tested.views(ask, self.now_s)
        choice = self.tested.choose(ask, self.now_s)
        even_s = UNEVEN * sum(view.recent_s for view in views) / 3
        weighed = {view.replica: weighed_s(ask, view, PLAIN, even_s) for view in views}
        assert weighed[choice.replica] == min(weighed.values())
        for view in views:
            matched = view.matched_tokens // 10
            assert set(digests[:matched]) <= self.plain[view.replica]
        self.tested.send(self.requests, choice, self.now_s)
        self.plain[choice.replica] |= set(digests)
        self.open.append(self.requests)
        self.requests += 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.tested.end(self.open.pop(which % len(self.open)), self.now_s)

    @rule(replica=st.sampled_from(REPLICAS), removed=st.sets(st.sampled_from([1, 2, 11, 12, 121, 212])))
    def tell(self, replica: str, removed: set[int]) -> None:
        self.tested.tell(replica, removed=removed)
        self.plain[replica] -= removed

    @rule(replica=st.sampled_from(REPLICAS))
    def die(self, replica: str) -> None:
        self.tested.forget(replica)
        self.tested.join(replica)
        self.plain[replica].clear()

    @invariant()
    def holds(self) -> None:
        self.tested.check()
        for view in self.tested.views(Ask([], 1), self.now_s):
            assert view.waiting_s >= 0.0
            assert self.tested.directory.count(view.replica) <= 12
        if not self.open:
            assert all(view.waiting_s == 0.0 for view in self.tested.views(Ask([], 1), self.now_s))


Walk.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestWalk = Walk.TestCase
