"""checkpoint_stops: where a prefill is cut to keep point state."""

from __future__ import annotations

from collections.abc import Iterable

from radixcache.settings import Settings


def checkpoint_stops(
    settings: Settings, prompt_tokens: int, marks: Iterable[int], matched: int, resumed: int, last: int
) -> dict[int, str]:
    """Offsets at which point state is worth keeping, with the reason: of several the most lasting one.

    Args:
        marks: offsets that the caller named.
        matched: tokens that the tree held; beyond `resumed`, where others may branch off as well.
        last: no offset beyond this one is reached.
    """
    stops = dict.fromkeys(marks, "mark")
    interval, tail = settings.checkpoint_interval, prompt_tokens - settings.tail_tokens
    if not any(tail <= mark < prompt_tokens for mark in stops):  # what a template rewrites is behind the last message
        stops[tail] = "tail"
    if matched > resumed:
        stops[min(matched, last)] = "branch"
    for offset in range(interval, last + 1, interval):
        # Close to another one it would save next to nothing and cost as much.
        if all(abs(offset - other) >= interval // 8 for other in stops):
            stops[offset] = "interval"
    return stops
