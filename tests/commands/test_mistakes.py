"""A mistake is one line on stderr and exit code 2, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace_formats import compact_bytes, mooncake_bytes

Command = Callable[..., tuple[int, str, str]]

#: A command and what its line says. TALKS: conversations of two users; TRACE: 300 requests; OWN: a recorded trace.
MISTAKES = """
advise none.jsonl | none.jsonl: cannot be read (No such file or directory); wanted a trace.
advise TRACE --json nowhere/x.json | nowhere/x.json: cannot be written
advise TRACE --block-tokens 64 | small.jsonl:1: hash_ids has
advise OWN --block-tokens 32 | names its own block length. Leave --block-tokens out
advise TRACE --plot x.bmp | --plot x.bmp: wanted .png, .svg, .pdf.
advise TRACE --model-config none.json | none.json: cannot be read
advise TRACE --model-config x --bytes-per-token 3 | exclude each other. Leave one out.
advise TRACE --bytes-per-token 0 | 0 bytes per token; wanted more than 0.
advise TRACE --bytes-per-token -1 | --bytes-per-token is -1.0; wanted 0 or more.
advise TRACE --bytes-per-checkpoint 5 | --bytes-per-checkpoint needs --bytes-per-token.
advise TRACE --kv-bits 4 | --kv-bits needs --model-config.
advise TRACE --budget-gib 1 | --budget-gib needs --model-config or --bytes-per-token.
advise TRACE --budget-gib 1 --bytes-per-token 0 --bytes-per-checkpoint 5 | --budget-gib needs bytes per token
advise TRACE --prefill-tokens-per-s 0 | --prefill-tokens-per-s is 0.0; wanted more than 0,
advise TRACE --capacity-blocks 3,4 | advise takes one budget; radixcache simulate takes several.
advise TRACE --capacity-blocks 3 --budget-gib 1 | exclude each other. Leave one out.
advise TRACE --jobs 0 | --jobs is 0; wanted at least 1.
advise TRACE --bytes-per-token 100 --budget-gib 1e-6 | --budget-gib is 1e-6; wanted at least a block of 51200 bytes.
advise TRACE --bytes-per-token 1 --budget-gib 1e305 | --budget-gib has '1e305'; wanted numbers above 0
advise TRACE --capacity-blocks 3 --disk-gib 1 | --disk-gib needs --model-config or
advise TRACE --bytes-per-token 2048 --disk-gib 1 | --disk-gib needs --budget-gib or --capacity-blocks.
advise TRACE --capacity-blocks 3 --disk-mib-per-s 0 | --disk-mib-per-s is 0.0; wanted more than 0, at most 1e+15.
synth nowhere/x.jsonl | nowhere/x.jsonl: cannot be written
synth x.jsonl --requests 0 | requests is 0; wanted 1 or more.
synth x.jsonl --agent-share 2 | agent_share is 2; wanted 0 to 1.
synth x.jsonl --zipf 1 | --zipf
simulate TRACE | give --capacity-blocks or --budget-gib
simulate TRACE --capacity-blocks 0 | --capacity-blocks has '0'; wanted numbers above 0
simulate TRACE --capacity-blocks 1.5 | wanted whole numbers
simulate TRACE --budget-gib 1 | --budget-gib needs --model-config or --bytes-per-token
simulate TRACE --budget-gib 1e305 --bytes-per-token 1 | --budget-gib has '1e305'; wanted numbers above 0
simulate TRACE FIVE --policy nothing | policy 'nothing' is not known
simulate TRACE FIVE --bytes-per-token 0 --bytes-per-checkpoint 5 | a block takes 0 bytes
simulate TRACE FIVE --jobs 0 | --jobs is 0; wanted at least 1
simulate TRACE SIZED --disk-gib nan | --disk-gib is nan; wanted more than 0,
simulate TRACE SIZED --disk-mib-per-s -1 | --disk-mib-per-s is -1.0; wanted more than 0,
simulate TRACE SIZED --prefill-tokens-per-s 0 | --prefill-tokens-per-s is 0.0; wanted more than 0,
simulate TRACE FIVE --disk-gib 1 | --disk-gib needs --model-config or --bytes-per-token.
simulate TRACE SIZED --disk-gib 1 --policy belady-bypass | belady-bypass works only without a disk.
simulate TRACE SIZED --bytes-per-checkpoint 1 --policy belady-bypass | belady-bypass works only without checkpoints
simulate TRACE FIVE --replicas 2,x | --replicas has 'x'; wanted whole numbers from 1 to 1,024.
simulate TRACE FIVE --replicas 0 | --replicas has '0'; wanted whole numbers from 1 to 1,024.
simulate TRACE FIVE --router hash | --router needs --replicas.
simulate TRACE FIVE --replicas 2 --router best | --router: router 'best' is not known. Known: random, round-robin, hash,
simulate TRACE FIVE --replicas 2 --shared-gib 2 | --shared-gib needs --model-config or --bytes-per-token.
simulate TRACE FIVE --replicas 2 --disk-gib 2 | --disk-gib is for one cache. Leave it or --replicas out.
simulate TRACE FIVE --replicas 2 --policy belady-bypass | --policy: belady-bypass knows the future of one cache
simulate TRACE FIVE --replicas 2 --decode-tokens-per-s 0 | --decode-tokens-per-s is 0.0; wanted more than 0,
replay TALKS --cache none,redis | --cache has 'redis'. Known: none, single, mlx-lm, radix.
replay TALKS --cache , | --cache names no cache
replay TALKS --policy best | --policy: policy 'best' is not known. Known:
replay TALKS --users 0 | --users is 0; wanted at least 1.
replay TALKS --users 3 | users is 3; wanted 1 to 2
replay TALKS --requests 0 | --requests is 0; wanted at least 1.
replay TALKS --max-tokens 0 | --max-tokens is 0; wanted at least 1.
replay TALKS --step-size -1 | --step-size is -1; wanted at least 1.
replay TALKS --parallel 0 | --parallel is 0; wanted at least 1.
replay TALKS --parallel 2 --cache none,radix | --parallel works with the caches radix and mlx-lm
replay TALKS --parallel 2 --recorded | --parallel generates replies, and --recorded feeds recorded replies.
replay TALKS --parallel 2 --exact | --exact promises equal bits
replay TALKS --parallel 2 --model tiny:llama4 | llama4: a layer's ChunkedKVCache cannot be decoded in a batch.
replay TALKS --budget-mib 0 | --budget-mib is 0; wanted more than 0.
replay TALKS --budget-mib nan | --budget-mib is nan; wanted more than 0.
replay TALKS --model /nowhere/model | /nowhere/model
replay TALKS --model tiny:nothing | tiny:nothing: no such kind
replay --conversations /nowhere/talk.jsonl | /nowhere/talk.jsonl: cannot be read (No such file or directory)
replay TALKS --json /nowhere/out.json | /nowhere/out.json: cannot be written (No such file or directory)
replay TALKS --plot / | /: cannot be written (is a folder
replay TALKS --plot x.gif | --plot x.gif: wanted .png, .svg, .pdf.
replay TALKS --seed soon | '--seed'
replay TALKS --no-such-option | --no-such-option
replay TALKS surplus | surplus
replay TALKS --tree out.pdf | out.pdf: the ending is '.pdf'; wanted one of .txt, .svg, .html, .json.
replay TALKS --tree /nowhere/out.svg | /nowhere/out.svg: cannot be written (No such file or directory)
replay TALKS --tree out.svg --cache none | --tree out.svg shows the radix cache; add radix to
replay TALKS --disk x --cache none | --disk is for the radix cache
replay TALKS --disk x --parallel 2 --cache radix | Leave --disk or --parallel out.
replay TALKS --disk x --disk-gib inf | --disk-gib is inf
replay TALKS --disk small.jsonl --cache radix | cannot be used as a store
tree PATH --format png | --format is 'png'; wanted text, svg, html, json.
tree PATH --format json --out x.svg | --format json does not match --out x.svg
tree PATH --max-nodes 0 | --max-nodes is 0; wanted at least 1.
tree PATH --users 9 | users is 9; wanted 1 to 2
tree PATH --model-config /nowhere/config.json | /nowhere/config.json: cannot be read
tree PATH --kv-bits 7 | kv_bits is 7
replay TALKS --stored-bits 6 | --stored-bits is 6; wanted 4 or 8.
replay TALKS --stored-bits 8 --exact | --stored-bits rounds stored state, so --exact is impossible.
replay TALKS --stored-bits 8 --cache none | --stored-bits is for the radix cache
serve --stored-bits 5 | --stored-bits is 5; wanted one of 4, 8.
simulate TRACE --stored-bits 8 | --stored-bits needs --model-config
tree PATH --out tree.png | tree.png: the ending is '.png'; wanted one of .txt, .svg, .html, .json.
tree PATH --out /nowhere/tree.svg | /nowhere/tree.svg: cannot be written (No such file or directory)
explain PATH --top 0 | --top is 0; wanted at least 1.
explain PATH --model /nowhere/at/all | no such folder
explain PATH --json /nowhere/at/all.json | cannot be written
explain /nowhere/talks.jsonl | /nowhere/talks.jsonl: cannot be read
reply | reply
"""
SHORT = {"FIVE": "--capacity-blocks 5", "SIZED": "--capacity-blocks 5 --bytes-per-token 2048"}
TRACES = {
    "small.jsonl": mooncake_bytes(synthesize(Synth(requests=300, block_tokens=512))),
    "own.jsonl": compact_bytes(synthesize(Synth(requests=9))),
}


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line(command: Command, talks: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.chdir(talks.parent)
    for name, content in TRACES.items():
        Path(name).write_bytes(content)
    words = {
        "TALKS": "--model tiny --conversations talks.jsonl",
        "PATH": "talks.jsonl --model tiny",
        "TRACE": "small.jsonl --time-unit milliseconds",
        "OWN": "own.jsonl",
        **SHORT,
    }
    given, _, message = mistake.partition(" | ")
    code, out, err = command(*" ".join(words.get(word, word) for word in given.split()).split())
    (line,) = err.strip().splitlines()
    assert (code, out, line[:7]) == (2, "", "error: ")
    assert message in line
