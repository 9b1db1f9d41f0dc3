"""Measure the cost of verification: per checked request, and in throughput at a share of checked requests.

Conversations of several users share a system prompt and grow turn by turn. Every request but the very first resumes.
Two caches serve the same requests in turns: one checks nothing, one checks every request. If a share p of the requests
is checked, the time per request grows by p times the difference: `adds % at SHARE`.

A check of a session is a cold prefill of the whole prompt and a comparison. A row of a group has two: that one, and a
cold prefill of prompt and reply when it closes. The users' rows of a turn decode together, and each counts for its part
of the time. The relative cost is highest for long prompts and short replies. The lengths here are those of a chat;
`prefill only` has no reply.
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
from radixcache import PrefixCache, Session

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
WAYS = ("session", "row")


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    repeats = 2 if options.quick else REPEATS
    rows = []
    for kind in KINDS[:1] if options.quick else KINDS:
        model = random_model(kind, small=options.quick)
        for name, reply_tokens in REPLIES.items():
            reply_tokens = min(reply_tokens, QUICK_REPLY) if options.quick else reply_tokens
            for way in WAYS:
                say(f"{kind}, {name}, {way}")
                rows.append(measure(f"{kind} x {len(model.layers)}", model, name, way, reply_tokens, repeats))
    title = "Cost of verification per request"
    publish("verify", title, rows, folder=options.results, repeats=repeats, conclusion=conclusion(rows))


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    column = f"adds % at {SHARE:g}"
    text = f"verify={SHARE:g} adds at most"
    for way in WAYS:
        of_way = [row for row in rows if row["way"] == way]
        chat = max((row for row in of_way if row["requests"] == "chat"), key=lambda row: row[column])
        worst = max(of_way, key=lambda row: row[column])
        verdict = "under" if chat[column] < AIM_PERCENT else "NOT under"
        text += (
            f" {chat[column]:.2f} % to a chat request that is a {way} ({chat['model']}; {verdict} {AIM_PERCENT:g} %), "
            f"and {worst[column]:.2f} % to one that decodes nothing ({worst['model']});"
        )
    return (
        f"{text[:-1]}. The largest relative error of {sum(row['checked'] for row in rows)} verified requests is "
        f"{max(row['error'] for row in rows):.1e}."
    )


def measure(name: str, model: Any, requests: str, way: str, reply_tokens: int, repeats: int) -> dict[str, Any]:
    """Serve the same conversations unchecked and checked, in turns; return a row."""
    run = serve if way == "session" else serve_together
    pairs = in_turns(lambda: run(model, 0.0, reply_tokens), lambda: run(model, 1.0, reply_tokens), repeats)
    plain = [statistics.mean(ms) for (ms, _), _ in pairs]
    checked = [statistics.mean(ms) for _, (ms, _) in pairs]
    adds = Spread.of(SHARE * (theirs - ours) / ours * 100 for ours, theirs in zip(plain, checked, strict=True))
    stats = [stats for _, (_, stats) in pairs]
    return {
        "model": name,
        "requests": requests,
        "way": way,
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
    return times, require_checked(cache, len(times) if share else 0)


def serve_together(model: Any, share: float, reply_tokens: int) -> tuple[list[float], Any]:
    """As `serve`, the users at once in rows of a group; the first turn, which is prefilled cold, is not timed."""
    random = np.random.default_rng(1)
    cache = PrefixCache(model, budget_bytes=BUDGET_BYTES, verify=share)
    histories = [random.integers(0, VOCABULARY, SYSTEM_TOKENS).tolist()] * USERS
    times = []
    for _ in range(TURNS):
        histories = [[*its, *random.integers(0, VOCABULARY, MESSAGE_TOKENS).tolist()] for its in histories]
        began = time.perf_counter()
        with cache.begin_many(histories, capacity=1 << 20) as group:
            replies = [[int(mx.argmax(group.prefill(model, row)))] for row in group.rows]  # type: ignore[arg-type]
            for _ in range(reply_tokens):
                logits = group.step(model, group.rows, [its[-1] for its in replies])
                for its, token in zip(replies, np.array(mx.argmax(logits[:, -1], axis=-1)), strict=True):
                    its.append(int(token))
        times.append((time.perf_counter() - began) * 1e3 / USERS)
        histories = [[*its, *said[:-1]] for its, said in zip(histories, replies, strict=True)]
    return times[1:], require_checked(cache, USERS * TURNS if share else 0)


def require_checked(cache: PrefixCache, count: int) -> Any:
    """The stats of a cache that has verified so many requests and found nothing wrong."""
    stats = cache.stats
    assert (stats.verify_mismatches, stats.verify_skipped, stats.verified_requests) == (0, 0, count), stats
    return stats


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
