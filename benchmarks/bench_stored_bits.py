"""Measure what fewer bits at rest save and cost: tokens held, hit ratios at equal bytes, errors, and times.

Held: a bfloat16 model serves conversations under one budget until it is full. The bytes are those of the arrays.

Hits: the simulator runs recorded traces with the sizes of an 8-billion model (32 layers, 8 heads of 128, bfloat16). The
traces are those of bench_policies.

Error: prompts are prefilled, their state is rounded as a tree would store it, and a reply is read on. The reply is the
model's own greedy one. An error is the largest difference of logits over the largest logit, without and with rounding.
The demo model gets prompts of the built-in conversations, the tiny random models get random tokens.

Times: a conversation is put into the tree, and a request goes on from it.

Reads: one layer's attention in float32 over state as it is, over its codes (`mx.quantized_matmul`), and over copies
that are made plain in each pass. Rows of a group read plain copies, which are made once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import runner  # noqa: F401  loads OpenBLAS before MLX
from benchmarks.harness.random_models import VOCABULARY, random_model
from benchmarks.harness.record import REPEATS, Spread, arguments, elapsed_ms, publish, rotated, say
from benchmarks.harness.recorded_traces import add_traces, traces_in
from radixcache import PrefixCache, render_chat
from radixcache.adapters.registry import leaves
from radixcache.adapters.span import SpanSnapshot, stored_nbytes
from runner.models import ModelBytes
from runner.models.load import load_model
from runner.models.tiny import TINY_KINDS, tiny_model
from runner.script.conversation_reader import builtin_conversations
from runner.simulate.simulator import BlockSizes, simulate
from runner.text import GIB, MIB

BITS = (None, 8, 4)
LAYERS, HEADS, WIDTH = 32, 8, 128
BUDGETS_GIB = {"mooncake": (64, 256, 1024), "coding agents": (4, 16, 64)}
#: Bits of keys, of values and of recurrent state.
WAYS = {"8": (8, 8, None), "4": (4, 4, None), "keys 8, values 4": (8, 4, None), "keys 4, values 8": (4, 8, None)}
STATES_TOO = {"states 8": (None, None, 8), "8, states 8": (8, 8, 8)}
PARTS = ("held", "hits", "times", "reads", "error-tiny", "error-demo")
PROMPTS, REPLY_TOKENS, TINY_PROMPT_TOKENS = 6, 32, 200
LONG_TOKENS, SHORT_TOKENS, NEW_TOKENS, STEP_SIZE = 4_000, 200, 16, 512
#: The heads of the demo model. With fewer queries for a key, codes do better.
KEY_HEADS, QUERIES_PER_KEY, HEAD_SIZE = 3, 3, 64

#: Packed codes, scales and biases.
Codes = tuple[mx.array, mx.array, mx.array]


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=add_options)
    quick, folder = options.quick, options.results
    if "held" in options.parts:
        rows = list(held(2 if quick else 24))
        title = "Tokens that a budget holds by bits at rest"
        publish("stored-bits", title, rows, folder=folder, repeats=1, conclusion=conclusion(rows))
    if "hits" in options.parts:
        hits = list(hit_ratios(options.traces, quick))
        publish("stored-bits-hits", "Hit ratios at equal bytes by bits at rest", hits, folder=folder, repeats=1)
    if "times" in options.parts:
        repeats = 2 if quick else REPEATS
        rows = times_of(repeats, 200 if quick else LONG_TOKENS, quick)
        title = "Time to store a conversation and to go on from it by bits at rest"
        publish("stored-bits-times", title, rows, folder=folder, repeats=repeats)
    if "reads" in options.parts:
        repeats = 2 if quick else 15
        rows = reads_of(repeats, 256 if quick else LONG_TOKENS)
        publish("stored-bits-reads", "Attention over state in fewer bits", rows, folder=folder, repeats=repeats)
    models = {"tiny": ["tiny:llama"] if quick else [f"tiny:{kind}" for kind in TINY_KINDS], "demo": ["demo"]}
    for name, title in (("tiny", "tiny random models"), ("demo", "the demo model")):
        if f"error-{name}" in options.parts and not (quick and name == "demo"):
            rows = list(errors_of(models[name], quick))
            file, title = f"stored-bits-error-{name}", f"Error of what was rounded at rest: {title}"
            publish(file, title, rows, folder=folder, repeats=1, conclusion=errors_in_words(rows))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_traces(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    ratios = [f"{row['times']:.2f} times with {row['bits']} bits" for row in rows[1:]]
    return f"The budget holds {' and '.join(ratios)} as many tokens as with 16."


def errors_in_words(rows: Sequence[dict[str, Any]]) -> str:
    """For each way to round the median and the largest error of all models, and the share of other greedy tokens."""
    said = []
    for way in dict.fromkeys(row["rounded"] for row in rows):
        its = [row for row in rows if row["rounded"] == way]
        median, most = statistics.median(row["error median"] for row in its), max(row["error max"] for row in its)
        parted = statistics.mean(row["greedy tokens that differ %"] for row in its)
        said.append(f"{way}: error {median:.2g}, at most {most:.2g}; {parted:.2g} % of greedy tokens differ")
    return "\n".join(said)


def held(budget_mib: int) -> Iterator[dict[str, Any]]:
    """Serve conversations until the budget is full, at each number of bits."""
    model = tiny_model("llama")
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    plain = 0.0
    for bits in BITS:
        cache = PrefixCache(model, budget_bytes=budget_mib << 20, stored_bits=bits)
        number = 0
        while not cache.stats.evictions:
            prompt = [number % 250, *np.random.default_rng(number).integers(0, 250, 511).tolist()]
            with cache.begin(prompt, reserve=1) as session:
                session.prefill(model)
                session.step(model, prompt[-1:])
            number += 1
        stats = cache.stats
        plain = plain or stats.tokens
        yield {
            "bits": bits or 16,
            "budget MiB": budget_mib,
            "tokens held": stats.tokens,
            "live MiB": stats.live_bytes / MIB,
            "paged MiB": stats.paged_bytes / MIB,
            "paged bytes per token": stats.paged_bytes / (stats.tokens - 512),
            "times": stats.tokens / plain,
        }


def hit_ratios(folder: Any, quick: bool) -> Iterator[dict[str, Any]]:
    """Simulate LRU on the recorded traces, at each budget and number of bits."""
    shapes = [(HEADS, WIDTH, mx.bfloat16)] * 2
    plain, *stored = (LAYERS * stored_nbytes(shapes, bits) for bits in BITS)
    for trace in traces_in(folder, quick):
        for budget_gib in BUDGETS_GIB.get(trace.name, (1,)):
            row: dict[str, Any] = {"trace": trace.name, "budget GiB": budget_gib}
            for bits, nbytes in zip(BITS, (None, *stored), strict=True):
                model = ModelBytes("llama", plain, 0, (), "bfloat16", nbytes)
                sizes = BlockSizes.of(model, trace.block_tokens)
                found = simulate(trace, "lru", int(budget_gib * GIB), sizes)
                row[f"{bits or 16} bits: cached tokens %"] = 100 * found.token_hit_ratio
            say(f"{row}")
            yield row


def errors_of(names: Sequence[str], quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each model and way to round that changes its state."""
    for name in names:
        model, prompts = prompts_for(name, 1 if quick else PROMPTS)
        has_states = any(isinstance(each, ArraysCache) for each in leaves(make_prompt_cache(model)))
        found: dict[str, list[tuple[float, float, float]]] = {}
        for prompt in prompts:
            caches, reply = read(model, prompt)
            wanted = after_rounding(model, caches, (None, None, None), reply)
            for way, bits in {**WAYS, **(STATES_TOO if has_states else {})}.items():
                logits = after_rounding(model, caches, bits, reply)
                found.setdefault(way, []).append(compared(logits, wanted))
        for way, values in found.items():
            errors, parted, gaps = zip(*values, strict=True)
            if max(errors) > 0:
                yield {
                    "model": name,
                    "rounded": way,
                    "error median": statistics.median(errors),
                    "error max": max(errors),
                    "greedy tokens that differ %": 100 * statistics.mean(parted),
                    "largest gap of those": max(gaps),
                }
        say(name)


def prompts_for(name: str, count: int) -> tuple[Any, list[list[int]]]:
    if name != "demo":
        random = np.random.default_rng(0)
        return tiny_model(name.partition(":")[2]), [
            random.integers(0, 250, TINY_PROMPT_TOKENS).tolist() for _ in range(count)
        ]
    loaded = load_model("demo")
    talks = builtin_conversations()[:count]
    prompts = [render_chat(loaded.tokenizer, talk.messages[:-1], tools=talk.tools)[0].tolist() for talk in talks]
    return loaded.model, prompts


def read(model: Any, prompt: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Caches at the end of a prompt but its last token, and the tokens to read from there."""
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-1]]), cache=caches)
    mx.eval([cache.state for cache in leaves(caches)])
    before, tokens = deepcopy(caches), [prompt[-1]]
    for _ in range(REPLY_TOKENS):
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
        tokens.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
    return before, tokens[:-1]


def after_rounding(
    model: Any, caches: Sequence[Any], bits: tuple[int | None, int | None, int | None], reply: Sequence[int]
) -> mx.array:
    """Logits (T, V) of a reply that is read on rounded copies of caches."""
    mine = deepcopy(caches)
    for cache in leaves(mine):
        if isinstance(cache, ArraysCache):
            cache.cache = [None if array is None else rounded(array, bits[2]) for array in cache.cache]
        elif getattr(cache, "keys", None) is not None:
            cache.keys, cache.values = rounded(cache.keys, bits[0]), rounded(cache.values, bits[1])
    return model(mx.array([reply]), cache=mine)[0].astype(mx.float32)  # type: ignore[no-any-return]


def rounded(array: Any, bits: int | None) -> Any:
    """An array as it comes back from a snapshot with so many bits."""
    if not isinstance(array, mx.array) or bits is None:
        return array
    rows = array.reshape(1, 1, -1, array.shape[-1])
    snapshot = SpanSnapshot(0, rows.shape[2], [(rows,)]).quantized(bits)
    ((_, _, (found,)),) = snapshot.parts(0, rows.shape[2])
    return (found + 0).reshape(array.shape)


def compared(found: mx.array, wanted: mx.array) -> tuple[float, float, float]:
    """The error of logits, the share of tokens whose highest logit is another, and the largest gap at one of these."""
    ours, theirs = np.array(found), np.array(wanted)
    parted = ours.argmax(-1) != theirs.argmax(-1)
    highest = np.sort(theirs, axis=-1)[:, -2:]
    gaps = (highest[:, 1] - highest[:, 0])[parted]
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max()), float(parted.mean()), float(gaps.max(initial=0))


def times_of(repeats: int, long_tokens: int, quick: bool) -> list[dict[str, Any]]:
    """Put a conversation into the tree and answer a request that goes on from it, all numbers of bits by turns."""
    model = random_model("kv", small=quick)
    random = np.random.default_rng(1)
    stored, others = (random.integers(1, VOCABULARY, count).tolist() for count in (long_tokens, SHORT_TOKENS))
    state = make_prompt_cache(model)
    for start in range(0, long_tokens, STEP_SIZE):
        mx.eval(model(mx.array([stored[start : start + STEP_SIZE]]), cache=state))
    caches = {bits: PrefixCache(model, stored_bits=bits, budget_bytes=4 << 30) for bits in BITS}
    found: dict[Any, list[tuple[float, float, float]]] = {bits: [] for bits in BITS}
    for turn in range(repeats + 1):
        for bits in rotated(BITS, turn):
            cache = caches[bits]
            cache.clear()
            serve(cache, model, others)  # the buffers of the live slot are there
            began = time.perf_counter()
            cache.insert(stored, state)
            insert_ms = (time.perf_counter() - began) * 1e3
            new = random.integers(1, VOCABULARY, NEW_TOKENS).tolist()
            found[bits].append((insert_ms, *serve(cache, model, [*stored, *new])))
    rows = []
    for bits in BITS:
        insert, begin, ttft = (Spread.of(column) for column in zip(*found[bits][1:], strict=True))
        rows.append(
            {
                "bits": f"{bits or 32}",
                "stored tokens": long_tokens,
                "insert ms": insert.median,
                "begin of the hit ms": begin.median,
                "TTFT of the hit ms": ttft.median,
                "min to max": ttft.range,
            }
        )
    return rows


def reads_of(repeats: int, tokens: int) -> list[dict[str, Any]]:
    """One layer's attention over plain state, over codes, and over codes that are made plain for each pass."""
    keys, values = (mx.random.normal((1, KEY_HEADS, tokens, HEAD_SIZE)) for _ in range(2))
    rows = []
    for queries in (1, 8, 64):
        query = mx.random.normal((1, KEY_HEADS * QUERIES_PER_KEY, queries, HEAD_SIZE))
        for bits in (8, 4):
            forms = mx.quantize(keys, bits=bits), mx.quantize(values, bits=bits)
            mx.eval(query, keys, values, forms)
            ways = [
                partial(attention, query, keys, values),
                partial(attention_on_codes, query, *forms, bits),
                partial(attention_on_copies, query, *forms, bits),
            ]
            times: list[list[float]] = [[] for _ in ways]
            for turn in range(repeats + 1):
                for way in rotated(range(len(ways)), turn):
                    times[way].append(elapsed_ms(lambda run=ways[way]: mx.eval(run())))  # type: ignore[misc]
            plain_ms, codes_ms, copies_ms = (statistics.median(its[1:]) for its in times)
            row = {"bits": bits, "queries": queries, "tokens": tokens, "plain ms": plain_ms}
            rows.append(row | {"codes, times plain": codes_ms / plain_ms, "copies, times plain": copies_ms / plain_ms})
    return rows


def attention(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=HEAD_SIZE**-0.5)


def attention_on_copies(queries: mx.array, keys: Codes, values: Codes, bits: int) -> mx.array:
    return attention(queries, *(mx.dequantize(*form, bits=bits) for form in (keys, values)))


def attention_on_codes(queries: mx.array, keys: Codes, values: Codes, bits: int) -> mx.array:
    grouped = (queries * HEAD_SIZE**-0.5).reshape(1, KEY_HEADS, QUERIES_PER_KEY, -1, HEAD_SIZE)
    scores = mx.softmax(times_codes(grouped, keys, bits, transpose=True), axis=-1, precise=True)
    return times_codes(scores, values, bits, transpose=False)


def times_codes(array: mx.array, form: Codes, bits: int, *, transpose: bool) -> mx.array:
    codes, scales, biases = (mx.expand_dims(each, 2) for each in form)
    return mx.quantized_matmul(array, codes, scales, biases, transpose=transpose, bits=bits)


def serve(cache: PrefixCache, model: Any, prompt: Sequence[int]) -> tuple[float, float]:
    """The ms of begin(), and until the first token."""
    began = time.perf_counter()
    with cache.begin(prompt) as session:
        begun = time.perf_counter()
        session.prefill(model, step_size=STEP_SIZE)
        mx.eval(session.step(model, prompt[-1:]))
        done = time.perf_counter()
    return (begun - began) * 1e3, (done - began) * 1e3


if __name__ == "__main__":
    main(sys.argv[1:])
