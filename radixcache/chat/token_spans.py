"""TokenSpans: the tokens of a rendered text, and up to which of them another text behind a border changes nothing."""

from typing import Any

import numpy as np

from radixcache.chat.template import ChatTemplate, common_rendering

# Beginnings of text that a tokenizer may merge with what stands before them, one per character class.
_FOLLOWERS = ("a", "s", "B", " a", " ", "  ", "\n", "\na", "\t", "1", ".", "'", "<", "_", "é", "中")
# Merges reach back over a word, not over a page: so many characters before a border are looked at.
_WINDOW_CHARS = 256


class TokenSpans:
    """Tokens of a text, and the characters that each stands for."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        encoding = template.encode([text])
        spans = np.asarray(encoding["offset_mapping"][0], dtype=np.int64).reshape(-1, 2)
        self._template = template
        self._text = text
        self.tokens = np.asarray(encoding["input_ids"][0], dtype=np.int32)
        # Several tokens may stand for one character, and some leave out the spaces they hold: make both columns ascend.
        self._starts = np.maximum.accumulate(spans[:, 0])
        self._ends = np.maximum.accumulate(spans[:, 1])
        control = template.control_tokens()
        self.control_texts = tuple(control.values())
        self._control_indices = np.flatnonzero(np.isin(self.tokens, np.fromiter(control, dtype=np.int32)))

    def offset(self, end: int, closed: bool) -> int:
        """How many tokens lie before the character at `end`, whatever text follows there."""
        if not closed and end not in self._ends[self._control_indices]:
            end = self._settled_end(end)
        return int(np.searchsorted(self._ends, end, "right"))

    def _settled_end(self, end: int) -> int:
        """Go back from a border to where no text behind it can change the tokens before.

        The last word before the border (in the pre-tokenizer's sense) may grow, so it is left out; tokenizing the same
        text with a follower of each kind shows what else changes.
        """
        before = self._control_indices[self._ends[self._control_indices] <= end]
        control_start = int(self._starts[before[-1]]) if len(before) else -1
        start = max(control_start, end - _WINDOW_CHARS, 0)
        window = self._text[start:end]
        encoding = self._template.encode([window, *(window + follower for follower in _FOLLOWERS)])
        settled = min(_common_end(encoding, other, len(window)) for other in range(1, len(_FOLLOWERS) + 1))
        return start + min(settled, _last_word_start(encoding, len(window), skip=start == control_start))


def _common_end(encoding: Any, other: int, length: int) -> int:
    """Where the tokens of text 0 and those of another text of the batch part, as a character offset in text 0."""
    spans, tokens = encoding["offset_mapping"][0], encoding["input_ids"][0]
    shared = common_rendering(tokens, encoding["input_ids"][other])
    return length if shared == len(tokens) else max((int(end) for _, end in spans[:shared]), default=0)


def _last_word_start(encoding: Any, length: int, skip: bool) -> int:
    """Where the last word of text 0 starts, or its length where it is one word, so that words tell nothing.

    Args:
        skip: the text starts with a control token, which is no word.
    """
    words = encoding.word_ids(0)
    first = len(words)
    while first > 0 and words[first - 1] == words[-1]:
        first -= 1
    return int(encoding["offset_mapping"][0][first][0]) if first > int(skip) else length
