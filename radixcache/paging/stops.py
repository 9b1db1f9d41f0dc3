"""checkpoint_stops: where a prefill is cut to keep point state."""

from __future__ import annotations

from collections.abc import Iterable

#: Chat templates rewrite the end of a prompt; a checkpoint this many tokens before it survives that.
TAIL_TOKENS = 16


def checkpoint_stops(
    prompt_tokens: int, marks: Iterable[int], matched: int, resumed: int, interval: int, last: int
) -> dict[int, str]:
    """Offsets at which point state is worth keeping, with the reason: of several the most lasting one.

    Args:
        marks: offsets that the caller named.
        matched: tokens that the tree held; beyond `resumed`, where others may branch off as well.
        interval: tokens between checkpoints anywhere.
        last: no offset beyond this one is reached.
    """
    stops = dict.fromkeys(marks, "mark")
    tail = prompt_tokens - TAIL_TOKENS
    if not any(tail <= mark < prompt_tokens for mark in stops):  # what a template rewrites is behind the last message
        stops[tail] = "tail"
    if matched > resumed:
        stops[min(matched, last)] = "branch"
    for offset in range(interval, last + 1, interval):
        # Close to another one it would save next to nothing and cost as much.
        if all(abs(offset - other) >= interval // 8 for other in stops):
            stops[offset] = "interval"
    return stops
