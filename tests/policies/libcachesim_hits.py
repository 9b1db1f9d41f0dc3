"""Run as a script in an environment that has libcachesim: hits of each policy on each trace, from JSON to JSON.

    python libcachesim_hits.py JOB.json HITS.json

JOB: {"policies": [...], "traces": [{"keys": [...], "capacity": ...}, ...]}; every object has size 1.
HITS: for each trace {policy: "0110..."}.
"""

import json
import sys
from pathlib import Path

NAMES = {
    "arc": "ARC",
    "belady": "Belady",
    "fifo": "FIFO",
    "gdsf": "GDSF",
    "lfu": "LFU",
    "lru": "LRU",
    "s3fifo": "S3FIFO",
    "sieve": "Sieve",
}
NEVER = 1 << 62


def next_uses(keys):
    last, uses = {}, [NEVER] * len(keys)
    for index in range(len(keys) - 1, -1, -1):
        uses[index] = last.get(keys[index], NEVER)
        last[keys[index]] = index
    return uses


def hits(policy, keys, capacity):
    import libcachesim

    cache = getattr(libcachesim, NAMES[policy])(cache_size=capacity, hashpower=12)
    request = libcachesim.Request()
    request.obj_size = 1
    found = []
    for time, (key, next_use) in enumerate(zip(keys, next_uses(keys), strict=True)):
        request.obj_id, request.clock_time, request.next_access_vtime = key, time, next_use
        found.append("1" if cache.get(request) else "0")
    return "".join(found)


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    rows = [{name: hits(name, each["keys"], each["capacity"]) for name in job["policies"]} for each in job["traces"]]
    Path(sys.argv[2]).write_text(json.dumps(rows))
