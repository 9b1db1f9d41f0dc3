"""Measure what importing radixcache adds to a program that has mlx-lm loaded: seconds, modules, packages of servers.

Each import runs in interpreters of its own, after `import mlx_lm`, in turns. The median over the repeats is shown.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.record import arguments, publish, rotated

REPEATS = 9
#: What only the server, the command line or plots need.
OF_SERVERS = (
    "fastapi",
    "starlette",
    "uvicorn",
    "llguidance",
    "PIL",
    "prometheus_client",
    "typer",
    "rich",
    "matplotlib",
)
STATEMENTS = {
    "the package": "import radixcache",
    "PrefixCache": "from radixcache import PrefixCache",
    "RadixPromptCache": "from radixcache.mlx_server import RadixPromptCache",
    "all public names": "from radixcache import *",
    "the server": "import runner.serve.app",
}
CODE = """
import sys, time, mlx_lm, mlx_lm.models.cache
before, began_s = set(sys.modules), time.perf_counter()
{statement}
took_s, new = time.perf_counter() - began_s, set(sys.modules) - before
print(took_s, len(new), *sorted({{name.partition(".")[0] for name in new}} & {{{names}}}))
"""


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given)
    repeats = 1 if options.quick else REPEATS
    found: dict[str, list[list[str]]] = {name: [] for name in STATEMENTS}
    for repeat in range(repeats):
        for name in rotated(list(STATEMENTS), repeat):
            code = CODE.format(statement=STATEMENTS[name], names=", ".join(map(repr, OF_SERVERS)))
            ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found[name].append(ran.stdout.split())
    rows: list[dict[str, Any]] = [
        {
            "what": name,
            "statement": STATEMENTS[name],
            "ms": 1e3 * statistics.median(float(each[0]) for each in runs),
            "modules": int(runs[0][1]),
            "of servers": " ".join(runs[0][2:]),
        }
        for name, runs in found.items()
    ]
    publish("import", "What an import adds to a program with mlx-lm", rows, folder=options.results, repeats=repeats)


if __name__ == "__main__":
    main()
