"""Conversations drawn at random, and at which marks of one another one resumes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from radixcache.chat import HEADER_TOKENS, render_chat
from radixcache.chat_template import common_rendering
from tests.chat.tokenizers import SENTENCES

SENTENCE = st.builds(" ".join, st.lists(st.sampled_from(" ".join(SENTENCES[:3]).split()), min_size=3, max_size=12))
CONTENT = st.one_of(
    SENTENCE,
    st.builds("{}\n\n  {}\n".format, SENTENCE, st.text(alphabet="abst 'l\n.1é中<", max_size=12)),
    st.builds("<think>{}</think>\n{}".format, SENTENCE, SENTENCE),
)


@st.composite
def two_conversations_that_share_a_beginning(draw: st.DrawFn) -> tuple[list[Any], list[Any], int]:
    has_system = draw(st.booleans())
    count = draw(st.integers(0, 4))
    roles = ["system"] * has_system + ["user", "assistant"] * 4
    shared = [{"role": role, "content": draw(CONTENT)} for role in roles[:count]]
    others = []
    for _ in range(2):
        # A request ends with the user's message, or with a reply that the caller wants stored.
        length = draw(st.integers(count + 1, count + 3))
        length = max(length, 1 + has_system)
        others.append(shared + [{"role": role, "content": draw(CONTENT)} for role in roles[count:length]])
    return others[0], others[1], count


def require_reuse(tokenizer: Any, pair: tuple[list[Any], list[Any], int], tools: list[Any] | None) -> None:
    """Another conversation resumes at a mark, and evaluates again no more than a header of what both share."""
    one, other, _ = pair
    tokens, marks = render_chat(tokenizer, one, tools)
    resumed, shared = resumed_tokens(tokens, marks, render_chat(tokenizer, other, tools)[0])
    assert shared - resumed <= HEADER_TOKENS, tokenizer.decode(tokens[resumed:shared])


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def resumed_tokens(tokens: Any, marks: Any, other: Any) -> tuple[int, int]:
    """How many tokens of another prompt can be resumed at marks of this one, and how many tokens both share."""
    shared = common_rendering(tokens.tolist(), other.tolist())
    return max((mark for mark in marks if mark <= shared), default=0), shared
