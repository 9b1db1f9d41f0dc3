"""The page at /cache, and what it asks for again and again. Never imports MLX.

The page itself holds nothing, so that a browser may load it without a key; its script asks for the rest with the key in
a header. What draws the tree is radixcache.view's. No style, script or request but its own gets past the page's policy.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from radixcache import CacheStats, PrefixCache
from radixcache.stores.stats import StoreStats
from radixcache.view.page import content_policy, document, page_file, tree_data, tree_markup
from radixcache.view.words import about_words, bytes_words, tokens_words, total_words
from runner.files.units import plural
from runner.serve.asked import DEFAULT, ModelNames
from runner.serve.metrics import Watched, read_caches
from runner.serve.watch import Seen, Watch, cut

#: Nodes that the page shows of a tree; the rest is counted where it hangs.
SHOWN_NODES = 2000


@cache
def cache_page() -> tuple[str, dict[str, str]]:
    """The page, and the headers that it goes out with."""
    style, script = (page_file(f"page.{kind}") + page_file(f"page.{kind}", __package__) for kind in ("css", "js"))
    connect = "; connect-src 'self'"
    body = page_file("page.html", __package__) + tree_markup()
    policy = f"{content_policy(style, script)}{connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return document("radixcache", body, style, script, connect), {**headers, "Referrer-Policy": "no-referrer"}


def page_state(
    watched: Watched, watch: Watch, model: str, seen: str, *, show_text: bool, show_tree: bool = True
) -> dict[str, Any]:
    """What the page shows, as values that JSON has.

    Args:
        model: whose tree is wanted, as in `models`; without such a cache, the present model's.
        seen: the version of the tree that the page shows: as long as it is the same, `tree` is None.
        show_text: show errors too, which may quote a prompt.
        show_tree: False: `tree` is None.
    """
    held = read_caches(watched, lambda opened: (opened, opened.stats))
    models = [title(names) for names, _ in held]
    brought_tokens = sum(stats.brought_tokens for _, (_, stats) in held)
    index = models.index(model) if model in models else len(models) - 1
    return {
        "models": models,
        "model": models[index] if models else "",
        "stats": {name: _finite(asdict(stats)) for name, (_, (_, stats)) in zip(models, held, strict=True)},
        "running": watched.running,
        "waiting": watched.waiting,
        "disk": stores_words(watched.store_stats(), brought_tokens),
        "points": [point._asdict() for point in watch.points()],
        "requests": [_row(each, show_text) for each in watch.seen()],
        "tree": _tree(models[index], *held[index][1], watched.running, seen) if models and show_tree else None,
    }


def stores_words(stores: Mapping[str, StoreStats], brought_tokens: int) -> list[str]:
    """What is beyond memory, what went there and came from there, and what went wrong, if anything did."""
    lines = [line for tier, stats in stores.items() for line in _store_words(tier, stats)]
    return [*lines, f"Since the start {tokens_words(brought_tokens)} were brought back."] if lines else []


def _store_words(tier: str, stats: StoreStats) -> list[str]:
    files = f"{plural(stats.blocks, 'block')} and {plural(stats.checkpoints, 'checkpoint')}"
    held = f"{bytes_words(stats.stored_bytes)} of {bytes_words(stats.budget_bytes)}"
    if not stats.budget_bytes:
        held = f"{bytes_words(stats.stored_bytes)}, as far as is known"
    lines = [
        f"{tier.capitalize()}: {files}, {held}.",
        f"Since the start: {bytes_words(stats.read_bytes)} read, {bytes_words(stats.written_bytes)} written, "
        f"{bytes_words(stats.evicted_bytes)} evicted. To be written: {bytes_words(stats.waiting_bytes)}.",
    ]
    counts = {
        "damaged and set aside": stats.damaged_files,
        "gone when they were to be read": stats.vanished_files,
        "could not be read": stats.read_errors,
    }
    if any(counts.values()):
        lines.append(f"Files: {', '.join(f'{count:,} {what}' for what, count in counts.items() if count)}.")
    if stats.dropped:
        reasons = ", ".join(f"{blocks:,} because {why}" for why, blocks in sorted(stats.dropped.items()))
        lines.append(f"Blocks that were not written: {reasons}.")
    if stats.failed_calls:
        failed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(stats.failed_calls.items()))
        lines.append(f"Calls that failed: {failed}.")
    if stats.stopped:
        lines.append(f"Nothing is written now: {stats.stopped}.")
    return lines


def title(names: ModelNames) -> str:
    """A model with its adapter and draft model, for people and for a query."""
    draft = None if names.draft == DEFAULT else names.draft
    return " + ".join(name for name in (names.model, names.adapter, draft) if name)


def _tree(name: str, opened: PrefixCache, stats: CacheStats, running: int, seen: str) -> dict[str, Any] | None:
    version = f"{zlib.crc32(repr((name, stats, running)).encode()):08x}"
    if version == seen:
        return None
    view = opened.view()
    words = {"version": version, "totals": total_words(view), "about": about_words(view)}
    return {**words, **tree_data(view, SHOWN_NODES)}


def _row(seen: Seen, show_text: bool) -> dict[str, Any]:
    record = seen.record
    note = cut(record.note) if record.note and (show_text or record.outcome != "error") else None
    about = {"time_s": seen.time_s, "model": cut(title(record.names)), "short": record.short_tokens, "note": note}
    return {**about, **{name: getattr(record, name) for name in _SHOWN}}


_SHOWN = (
    "id", "namespace", "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms",
    "ttft_ms", "tokens_per_s", "outcome",
)  # fmt: skip


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """With text where a number is infinite, for which JSON has no word."""
    return {name: "+Inf" if value == math.inf else value for name, value in values.items()}
