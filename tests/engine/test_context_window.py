"""What a conversation loses when it is longer than the context, and what it never loses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.generation import OPENING_TOKENS, SINK_TOKENS, ContextError, ContextWindow

WINDOW = ContextWindow(100)
# A system prompt of 20 tokens, then messages that end at these offsets, the last of them the question.
CHAT = WINDOW.over(126, (20, 40, 62, 90, 120))


def test_nothing_goes_while_all_fits():
    assert CHAT.excess(length=60, room=40) == 0
    assert CHAT.excess(length=80, room=20) == 0


@pytest.mark.parametrize(
    ("window", "length", "room", "gone"),
    [
        # 27 too many; a quarter is 25, so 50 go: the second message ends 42 behind the system prompt, the third 70.
        (CHAT, 126, 1, 70),
        # 10 too many: the first message would do, a quarter takes the second one too.
        (CHAT, 109, 1, 42),
        # Of 120 tokens 20 are too many, and the message of 10 is not enough: from the question go 25 in all.
        (WINDOW.over(126, (20, 30, 120)), 119, 1, 25),
        # What the message of 10 frees is enough, though it is no quarter.
        (WINDOW.over(126, (20, 30, 120)), 100, 10, 10),
        # Without marks the oldest tokens go, but the very first stay.
        (WINDOW.over(120, ()), 120, 1, 25),
        # No system prompt: the first mark is where the first message ends, and that one may go.
        (WINDOW.over(120, (30, 60, 114), head=0), 120, 1, 30),
    ],
)
def test_whole_messages_go_the_oldest_first_until_a_quarter_is_free_and_the_question_last(window, length, room, gone):
    assert window.excess(length, room) == gone
    assert WINDOW.over(120, ()).head == SINK_TOKENS


def test_a_second_cut_leaves_out_what_the_first_one_took():
    window = WINDOW.over(400, ())
    assert window.excess(length=100, room=1) == 25
    assert window.excess(length=100, room=1, dropped=25) == 25


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(ContextError, match=r"126 tokens and 1 more .* 100: the first 110 and the last 6 must stay"):
        WINDOW.over(126, (110, 120)).excess(length=126, room=1)


@st.composite
def prompts(draw):
    keep = draw(st.integers(0, 30))
    lengths = draw(st.lists(st.integers(1, 60), max_size=8))
    opening = draw(st.integers(0, 5))
    ends, at = [], keep
    for length in lengths:
        at += length
        ends.append(at)
    return max(1, at + opening), ends, keep


@given(
    prompt=prompts(),
    reply=st.integers(0, 80),
    room=st.integers(0, 40),
    tokens=st.integers(2, 150),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_a_cut_makes_the_room_and_leaves_beginning_opening_and_reply(prompt, reply, room, tokens, share):
    window = ContextWindow(tokens, share).over(*prompt)
    length = window.length + reply
    try:
        gone = window.excess(length, room)
    except ContextError:
        opening = max(1, min(OPENING_TOKENS, window.length - window.ends[-1]) if window.ends else 1)
        assert window.head + opening + reply + room > tokens
        return
    assert gone >= 0
    assert length - gone + room <= tokens
    assert gone == 0 or window.head + gone <= window.limit < window.length
    # Going on from there is going on from the same place: what is gone is not asked for again.
    assert window.excess(length - gone, room, dropped=gone) == 0
    whole = {end - window.head for end in window.ends[:-1]}
    if gone and max(whole, default=0) >= length + room - tokens:
        assert gone in whole
