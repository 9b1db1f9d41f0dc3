"""Measure the cost of verification: per checked request, and in throughput at a share of checked requests.

Conversations of several users share a system prompt and grow turn by turn. Every request but the very first resumes.
Two caches serve the same requests in turns: one checks nothing, one checks every request. If a share p of the requests
is checked, the time per request grows by p times the difference: `adds % at SHARE`.

A check is a cold prefill of the whole prompt and a comparison. Its relative cost is highest for long prompts and short
replies. The lengths here are those of a chat; `prefill only` has no reply.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.random_models import VOCABULARY, random_model
from benchmarks.harness.record import REPEATS, Spread, arguments, in_turns, publish, say
from radixcache import PrefixCache
from radixcache.sessions.session import Session

SHARE = 0.01
AIM_PERCENT = 3.0
KINDS = ("kv", "sliding", "hybrid")
BUDGET_BYTES = 8 << 30
USERS = 2
TURNS = 3
SYSTEM_TOKENS = 300
MESSAGE_TOKENS = 60
REPLIES = {"chat": 128, "prefill only": 0}
QUICK_REPLY = 8


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    repeats = 2 if options.quick else REPEATS
    rows = []
    for kind in KINDS[:1] if options.quick else KINDS:
        model = random_model(kind, small=options.quick)
        for name, reply_tokens in REPLIES.items():
            reply_tokens = min(reply_tokens, QUICK_REPLY) if options.quick else reply_tokens
            say(f"{kind}, {name}")
            rows.append(measure(f"{kind} x {len(model.layers)}", model, name, reply_tokens, repeats))
    title = "Cost of verification per request"
    publish("verify", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Compare the results with the aim."""
    column = f"adds % at {SHARE:g}"
    chat = max((row for row in rows if row["requests"] == "chat"), key=lambda row: row[column])
    worst = max(rows, key=lambda row: row[column])
    verdict = "under" if chat[column] < AIM_PERCENT else "NOT under"
    return (
        f"verify={SHARE:g} adds at most {chat[column]:.2f} % to a chat request ({chat['model']}; {verdict} "
        f"{AIM_PERCENT:g} %), and at most {worst[column]:.2f} % to a request that decodes nothing ({worst['model']}). "
        f"The largest relative error of {sum(row['checked'] for row in rows)} checks is "
        f"{max(row['error'] for row in rows):.1e}."
    )


def measure(name: str, model: Any, requests: str, reply_tokens: int, repeats: int) -> dict[str, Any]:
    """Serve the same conversations unchecked and checked, in turns; return a row."""
    pairs = in_turns(lambda: serve(model, 0.0, reply_tokens), lambda: serve(model, 1.0, reply_tokens), repeats)
    plain = [statistics.mean(ms) for (ms, _), _ in pairs]
    checked = [statistics.mean(ms) for _, (ms, _) in pairs]
    adds = Spread.of(SHARE * (theirs - ours) / ours * 100 for ours, theirs in zip(plain, checked, strict=True))
    stats = [stats for _, (_, stats) in pairs]
    return {
        "model": name,
        "requests": requests,
        "prompt tokens": SYSTEM_TOKENS + MESSAGE_TOKENS * TURNS + reply_tokens * (TURNS - 1),
        "reply tokens": reply_tokens,
        "request ms": statistics.median(plain),
        "checked request ms": statistics.median(checked),
        f"adds % at {SHARE:g}": adds.median,
        "min to max": adds.range,
        "checked": sum(each.verified_requests for each in stats),
        "error": max(each.verify_largest_error for each in stats),
    }


def serve(model: Any, share: float, reply_tokens: int) -> tuple[list[float], Any]:
    """Return the ms of each resumed request of all conversations, and the stats of the cache."""
    random = np.random.default_rng(1)
    cache = PrefixCache(model, budget_bytes=BUDGET_BYTES, verify=share)
    system = random.integers(0, VOCABULARY, SYSTEM_TOKENS).tolist()
    histories = [list(system) for _ in range(USERS)]
    times = []
    for _ in range(TURNS):
        for history in histories:
            history += random.integers(0, VOCABULARY, MESSAGE_TOKENS).tolist()
            began = time.perf_counter()
            with cache.begin(history, marks=[SYSTEM_TOKENS], reserve=reply_tokens) as session:
                history += reply(session, model, reply_tokens)
            if session.cached_tokens:
                times.append((time.perf_counter() - began) * 1e3)
    stats = cache.stats
    assert (stats.verify_mismatches, stats.verify_skipped) == (0, 0), stats
    assert stats.verified_requests == (len(times) if share else 0), stats
    return times, stats


def reply(session: Session, model: Any, count: int) -> list[int]:
    """Prefill and decode greedily; return the tokens."""
    session.prefill(model, step_size=512)
    token = mx.argmax(session.step(model, session.prompt[-1:])[:, -1, :], axis=-1)
    tokens = []
    for _ in range(count):
        following = mx.argmax(session.step(model, token)[:, -1, :], axis=-1)
        mx.async_eval(following)
        tokens.append(int(token.item()))  # type: ignore[arg-type]
        token = following
    mx.eval(token)
    return tokens


if __name__ == "__main__":
    main(sys.argv[1:])
