"""Compare the prefix caches of MLX servers: send the same requests to radixcache serve and to five other servers.

Every server runs in its own environment (`--venvs`), on the same model folder, with a prefix cache of 2 GiB. All
servers of a model run at the same time. They take turns by request, and the first server changes each time. Only one
server has requests at any time, and all requests of "at once" and "restart" are one turn. A pause of 0.2 s before each
turn is not counted: some servers still compute after the end of a reply.

    shared      8 users with one system prompt, one after the other
    at once     8 users with another system prompt, at the same time
    growing     2 conversations of 4 turns, by turns
    edit        a long conversation, then twice the same conversation with another message in the middle
    regenerate  the same request three times
    decode      one user: the same request nine times, with replies of 96 tokens
    restart     two requests; the server restarts, with its disk option if it has one; then one of the requests again,
                and one with another last message. Only the requests after the restart count.
    window      3 users with a system prompt, and a conversation of 2 turns, on a model with sliding windows
    hybrid      the same on a model with recurrent layers (short convolutions)

    evaluated tokens  prompt tokens minus cached tokens, as the server reports them, at least one for each request;
                      empty: the server does not report them
    TTFT ms           from the request to the first piece of text
    decode ms         from the first piece of text to the end of the reply, by its tokens after the first, median
    tokens/s          generated tokens by the seconds of the whole scenario
    peak MB           peak resident memory of the process tree during the scenario, including the model
    equal             answers that equal those of a cold run: the last request of two users, sent to the same server
                      without its prefix cache, at temperature 0

With `--guests`, each of three servers takes turns with itself, with a PrefixCache in place of its own cache
(examples/guests).

A server that fails to install, start or answer is left out; the output names the server and the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_serve import WORDS
from benchmarks.harness.chat_stream import Answer, ask_stream
from benchmarks.harness.model_folder import write_model, write_word_model
from benchmarks.harness.peer_servers import GUESTS, PEERS, Peer, PeerError, PeerProcess, install, versions
from benchmarks.harness.random_models import random_kind
from benchmarks.harness.record import arguments, publish, rotated, say
from runner.models.demo import cache_home, demo_model_folder

OURS, THEIRS = "radixcache serve", "mlx_lm.server"
LAYERS = 8
REPLY_TOKENS = 16
COLD_USERS = 2
#: Before each turn: the process of the turn before may still compute, which slows the first token by up to 20 ms.
PAUSE_S = 0.2
#: Scale of prompts by model: a word is one token for the demo model and five for a tiny model.
SCALES = {"tiny": 0.05, "demo": 0.25}

Message = dict[str, str]
Prompt = list[Message]


@dataclass(frozen=True)
class Scenario:
    """Requests by user, each the messages of one request.

    Attributes:
        kind: the model: main, window or hybrid.
        before: requests before a restart, which do not count; empty: no restart.
    """

    name: str
    users: Sequence[Sequence[Prompt]]
    kind: str = "main"
    at_once: bool = False
    before: Sequence[Prompt] = ()
    reply_tokens: int = REPLY_TOKENS

    def parts(self) -> list[Scenario]:
        """Its requests one by one, or all that come at once."""
        if self.at_once:
            return [self]
        return [
            replace(self, users=[each[turn : turn + 1] if each is user else [] for each in self.users])
            for turn in range(max(map(len, self.users)))
            for user in self.users
            if turn < len(user)
        ]


def scenarios(scale: float = 1.0) -> list[Scenario]:
    """Return all scenarios. No two scenarios share a prefix."""

    def text(seed: str, words: int) -> str:
        random = np.random.default_rng(list(seed.encode()))
        return " ".join(random.choice(WORDS, max(3, int(words * scale))))

    def behind(name: str, system: int, *rest: str, words: int = 30) -> Prompt:
        """Return a system prompt, then messages of user and assistant by turns. Names seed the texts."""
        messages = [{"role": "system", "content": text(name, system)}]
        for index, each in enumerate(rest):
            role = ("user", "assistant")[index % 2]
            messages.append({"role": role, "content": text(f"{name} {each}", words)})
        return messages

    def turns(name: str, user: int, count: int, system: int, words: int) -> list[Prompt]:
        said = [f"user {user} message {index}" for index in range(2 * count)]
        return [behind(name, system, *said[: 2 * turn + 1], words=words) for turn in range(count)]

    def mixed(name: str) -> list[list[Prompt]]:
        return [*([behind(name, 700, f"question {user}")] for user in range(3)), turns(name, 9, 2, 700, 60)]

    long = [f"message {index}" for index in range(7)]
    edited = [behind("edit", 200, *long[:3], f"edit {edit}", *long[4:], words=150) for edit in range(2)]
    again = [behind("restart", 600, f"question {number}") for number in range(3)]
    return [
        Scenario("shared", [[behind("shared", 600, f"question {user}")] for user in range(8)]),
        Scenario("at once", [[behind("at once", 600, f"question {user}")] for user in range(8)], at_once=True),
        Scenario("growing", [turns("growing", user, 4, 100, 100) for user in range(2)]),
        Scenario("edit", [[behind("edit", 200, *long, words=150), *edited]]),
        Scenario("regenerate", [[behind("regenerate", 600, "question")] * 3]),
        Scenario("decode", [[behind("decode", 300, "question")] * 9], reply_tokens=96),
        Scenario("restart", [[again[0]], [again[2]]], before=again[:2]),
        Scenario("window", mixed("window"), kind="window"),
        Scenario("hybrid", mixed("hybrid"), kind="hybrid"),
    ]


NAMES = [scenario.name for scenario in scenarios()]


# Models --------------------------------------------------------------------------------------------------------------


def model_folder(model: str, kind: str, folder: Path) -> Path:
    """Return the folder of a model; write a random model into `folder`.

    Args:
        model: `random`, `demo`, `tiny` or a folder: the main model. The two others are tiny or random.
        kind: main, window or hybrid.
    """
    if kind == "main" and model == "demo":
        return demo_model_folder()
    if kind == "main" and model not in ("random", "tiny"):
        return Path(model).resolve()
    path = folder / f"model-{kind}"
    if model == "tiny":
        return write_model(path, {"main": "llama", "window": "gemma3_text", "hybrid": "lfm2"}[kind])
    made = random_kind({"main": "kv", "window": "sliding", "hybrid": "conv"}[kind])
    if kind == "main":
        made = replace(made, overrides={**made.overrides, "num_hidden_layers": LAYERS})
    write_word_model(path, made)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The result of one scenario at one server; answers by user."""

    answers: Sequence[Sequence[Answer]]
    total_s: float
    peak_bytes: int

    def __add__(self, other: Run) -> Run:
        """Return both runs as one; the same users go on."""
        answers = [[*own, *more] for own, more in zip(self.answers, other.answers, strict=True)]
        return Run(answers, self.total_s + other.total_s, max(self.peak_bytes, other.peak_bytes))

    @property
    def flat(self) -> list[Answer]:
        return [answer for user in self.answers for answer in user]


def ask_all(process: PeerProcess, scenario: Scenario, model: str) -> Run:
    """Send all requests of a scenario: users at the same time, or one request of each user by turns."""

    def talk(prompts: Sequence[Prompt]) -> list[Answer]:
        return [ask_stream(process.url, model, prompt, scenario.reply_tokens) for prompt in prompts]

    began_s = time.perf_counter()
    with process.measured():
        if scenario.at_once:
            with ThreadPoolExecutor(len(scenario.users)) as pool:
                answers = list(pool.map(talk, scenario.users))
        else:
            answers = [[] for _ in scenario.users]
            for turn in range(max(map(len, scenario.users))):
                for user, prompts in enumerate(scenario.users):
                    answers[user] += talk(prompts[turn : turn + 1])
        total_s = time.perf_counter() - began_s
    return Run(answers, total_s, process.peak_bytes)


class Bench:
    """All servers on all models; the results are `rows`, `left_out` and `notes`."""

    def __init__(self, servers: dict[str, tuple[Peer, Path]], model: str, folder: Path) -> None:
        self._servers, self._model, self._folder = servers, model, folder
        self._runs: dict[tuple[str, str], Run] = {}
        self._cold: dict[tuple[str, str], list[Answer]] = {}
        self.left_out: list[dict[str, str]] = []
        self.notes: dict[str, list[str]] = defaultdict(list)

    def measure(self, wanted: Sequence[Scenario]) -> list[dict[str, Any]]:
        """Run the scenarios, model by model; return a row for each scenario and server."""
        for kind in dict.fromkeys(scenario.kind for scenario in wanted):
            model = model_folder(self._model, kind, self._folder)
            own = [scenario for scenario in wanted if scenario.kind == kind]
            self._measure_up([scenario for scenario in own if not scenario.before], kind, model)
            for scenario in own:
                if scenario.before:
                    self._measure_restart(scenario, model)
            self._ask_cold(own, kind, model)
        return [row for scenario in wanted for row in self._rows(scenario)]

    def _measure_up(self, wanted: Sequence[Scenario], kind: str, model: Path) -> None:
        """Measure scenarios without a restart: all servers run and take turns."""
        if not wanted:
            return
        with ExitStack() as stack:
            up = {}
            for name in self._servers:
                say(f"{kind} model: start {name}")
                try:
                    process = stack.enter_context(self._process(name, model, f"{kind}-{name}"))
                    self._warm_up(process, model)
                    up[name] = process
                except PeerError as error:
                    self._leave_out(name, f"all on the {kind} model", error)
            for index, scenario in enumerate(wanted):
                say(scenario.name)
                for number, part in enumerate(scenario.parts()):
                    for name in rotated(list(up), index + number) if up else ():
                        time.sleep(PAUSE_S)
                        self._record(part, name, up[name], ask_all(up[name], part, str(model)))
                        if up[name].has_ended:
                            self._leave_out(name, f"what follows {scenario.name}", PeerError("the server crashed"))
                            del up[name]

    def _measure_restart(self, scenario: Scenario, model: Path) -> None:
        for name in rotated(list(self._servers), len(NAMES) // 2):
            say(f"{scenario.name}: {name}")
            has_disk = self._servers[name][0].disk is not None
            if not has_disk:
                self.notes[name].append("restart: the server has no option for a disk")
            try:
                with self._process(name, model, f"restart-{name}", is_on_disk=has_disk) as process:
                    ask_all(process, Scenario("", [scenario.before]), str(model))
                with self._process(name, model, f"restart-{name}", is_on_disk=has_disk) as process:
                    self._record(scenario, name, process, ask_all(process, scenario, str(model)))
            except PeerError as error:
                self._leave_out(name, scenario.name, error)

    def _ask_cold(self, wanted: Sequence[Scenario], kind: str, model: Path) -> None:
        """Send the last request of the first users again, to servers without a prefix cache."""
        for name in self._servers:
            asked = [scenario for scenario in wanted if (scenario.name, name) in self._runs]
            if not asked:
                continue
            say(f"{kind} model: cold run of {name}")
            try:
                with self._process(name, model, f"cold-{kind}-{name}", is_cached=False) as process:
                    for scenario in asked:
                        answers = self._cold[scenario.name, name] = []
                        for prompts in scenario.users[-COLD_USERS:]:
                            process.clear_cache()
                            answers.append(ask_stream(process.url, str(model), prompts[-1], scenario.reply_tokens))
                        if found := sum(answer.cached_tokens or 0 for answer in answers):
                            self.notes[name].append(f"{scenario.name}: the cold run found {found} cached tokens")
            except PeerError as error:
                self.notes[name].append(f"{kind} model: no cold run: {error}")

    def _process(self, name: str, model: Path, home: str, **options: bool) -> PeerProcess:
        peer, python = self._servers[name]
        return PeerProcess(peer, python, model, self._folder / home.replace(" ", "-"), **options)

    def _warm_up(self, process: PeerProcess, model: Path) -> None:
        answer = ask_stream(process.url, str(model), [{"role": "user", "content": "Are you there?"}], 2)
        if answer.error:
            raise PeerError(f"the first request failed: {process.last_error or answer.error}")

    def _leave_out(self, name: str, where: str, error: PeerError) -> None:
        self.left_out.append({"server": name, "scenarios": where, "reason": str(error)})
        say(f"left out: {name}, {where}: {error}")

    def _record(self, scenario: Scenario, name: str, process: PeerProcess, run: Run) -> None:
        before = self._runs.get((scenario.name, name))
        self._runs[scenario.name, name] = run if before is None else before + run
        if errors := [answer.error for answer in run.flat if answer.error]:
            self.notes[name].append(f"{scenario.name}: {len(errors)} of {len(run.flat)} requests failed: {errors[0]}")

    def _rows(self, scenario: Scenario) -> Iterator[dict[str, Any]]:
        for name in self._servers:
            if (run := self._runs.get((scenario.name, name))) is None:
                continue
            equal, compared = self._equal(scenario, name, run)
            if equal < compared:
                self.notes[name].append(f"{scenario.name}: {compared - equal} of {compared} answers differ from cold")
            if any(not answer.text and not answer.error for answer in run.flat):
                self.notes[name].append(f"{scenario.name}: an answer has no text")
            reports = any(
                answer.cached_tokens is not None
                for (_, other), each in self._runs.items()
                if other == name
                for answer in each.flat
            )
            yield row_of(scenario.name, name, run, reports, f"{equal} of {compared}" if compared else None)

    def _equal(self, scenario: Scenario, name: str, run: Run) -> tuple[int, int]:
        """Return the number of answers equal to the cold run, and the number compared."""
        warm = [user[-1] for user in run.answers[-COLD_USERS:]]
        cold = self._cold.get((scenario.name, name), [])
        pairs = [(a.text, b.text) for a, b in zip(warm, cold, strict=False) if not a.error and not b.error]
        return sum(a == b for a, b in pairs), len(pairs)


def row_of(scenario: str, server: str, run: Run, reports: bool, equal: str | None) -> dict[str, Any]:
    """Return the row of one run. `reports`: the server reports cached tokens, and a missing number means none."""
    good = [answer for answer in run.flat if not answer.error]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in good)
    # Some servers report a whole prompt as cached, but evaluate its last token again, for the logits.
    cached_tokens = sum(min(each.cached_tokens or 0, max(0, (each.prompt_tokens or 0) - 1)) for each in good)
    ttft_ms = [1e3 * answer.ttft_s for answer in good]
    later_tokens = [((each.completion_tokens or 0) - 1, each.decode_s) for each in good]
    decode_ms = [1e3 * seconds / tokens for tokens, seconds in later_tokens if tokens > 0]
    return {
        "scenario": scenario,
        "server": server,
        "requests": len(run.flat),
        "failed": len(run.flat) - len(good),
        "prompt tokens": prompt_tokens,
        "evaluated tokens": prompt_tokens - cached_tokens if reports else None,
        "TTFT ms p50": float(np.percentile(ttft_ms, 50)) if good else None,
        "TTFT ms p95": float(np.percentile(ttft_ms, 95)) if good else None,
        "decode ms": float(np.median(decode_ms)) if decode_ms else None,
        "tokens/s": sum(answer.completion_tokens or 0 for answer in good) / run.total_s,
        "peak MB": run.peak_bytes / 1e6,
        "equal": equal,
    }


def conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Count the scenarios in which radixcache is the best, and name the other scenarios."""
    said = []
    figures = ("evaluated tokens", "TTFT ms p50", "decode ms", "tokens/s", "peak MB")
    for figure in figures:
        best = max if figure == "tokens/s" else min
        lost, count = [], 0
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            found = {row["server"]: row[figure] for row in rows if row["scenario"] == scenario}
            known = {server: value for server, value in found.items() if value is not None}
            if OURS not in known or len(known) < 2:
                continue
            count += 1
            first = best(known, key=lambda server: known[server])
            if known[first] != known[OURS]:
                lost.append(f"{scenario} ({first} {known[first]:,.0f}, radixcache {known[OURS]:,.0f})")
        if count:
            won = f"{figure}: radixcache is best in {count - len(lost)} of {count} scenarios"
            said.append(won + f", but not in {', '.join(lost)}" * bool(lost) + ".")
    return "\n".join(said)


def guests_conclusion(rows: Sequence[dict[str, Any]]) -> str:
    """Say of each guest in how many scenarios the PrefixCache evaluates fewer tokens, and where it is slower."""
    said = []
    for name, guest in GUESTS.items():
        own = {row["scenario"]: row for row in rows if row["server"] == name}
        pairs = [(own[row["scenario"]], row) for row in rows if row["server"] == guest.name and row["scenario"] in own]
        if not pairs:
            continue
        tokens = [(a["evaluated tokens"], b["evaluated tokens"]) for a, b in pairs if a["evaluated tokens"] is not None]
        waits = {b["scenario"]: b["TTFT ms p50"] / a["TTFT ms p50"] for a, b in pairs if a["failed"] + b["failed"] == 0}
        slower = [f"{scenario} {ratio:.2f}" for scenario, ratio in waits.items() if ratio > 1 / 0.95]
        counted = (
            f"at most as many tokens are evaluated in {sum(b <= a for a, b in tokens)} of {len(tokens)} scenarios, at "
            f"most half in {sum(2 * b <= a for a, b in tokens)}"
            if tokens
            else "evaluated tokens are not reported"
        )
        said.append(
            f"{name}: with a PrefixCache {counted}; TTFT p50 is "
            f"{min(waits.values(), default=1):.2f} to {max(waits.values(), default=1):.2f} of its own"
            + f", longer in {', '.join(slower)}" * bool(slower)
            + "."
        )
    return "\n".join(said)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, given, add=_add_options)
    known = {**PEERS, **{guest.name: guest for guest in GUESTS.values()}}
    if options.guests and not options.servers:
        options.servers = [each for name, guest in GUESTS.items() for each in (name, guest.name)]
    names = options.servers or ([OURS, THEIRS] if options.quick else list(PEERS))
    model = options.model or ("tiny" if options.quick else "random")
    wanted = [s for s in scenarios(SCALES.get(model, 1.0)) if s.name in (options.scenarios or NAMES)]
    if options.quick and not options.scenarios:
        wanted = wanted[:1]
    left_out, servers = [], {}
    for name in names:
        say(f"environment of {name}")
        try:
            servers[name] = (known[name], install(known[name], options.venvs))
        except PeerError as error:
            left_out.append({"server": name, "scenarios": "all", "reason": str(error)})
    with tempfile.TemporaryDirectory(prefix="radixcache-peers-", ignore_cleanup_errors=True) as folder:
        bench = Bench(servers, model, Path(folder))
        rows = bench.measure(wanted)
    left_out += bench.left_out
    if not rows:
        sys.exit(f"No server could be measured: {left_out}")
    publish(
        "guests" if options.guests else "peers",
        "Servers with their own prefix cache and with a PrefixCache"
        if options.guests
        else "Prefix caches of MLX servers",
        rows,
        folder=options.results,
        repeats=1,
        conclusion=(guests_conclusion if options.guests else conclusion)(rows),
        model=f"random llama, {LAYERS} layers x 384" if model == "random" else Path(model).name,
        servers={name: versions(python, peer) for name, (peer, python) in servers.items()},
        left_out=left_out,
        notes={name: bench.notes[name] or ["no crash, no failed request, no wrong answer"] for name in servers},
    )
    for each in left_out:
        print(f"left out: {each['server']} ({each['scenarios']}): {each['reason']}")
    for name in servers:
        print(f"{name}: {'; '.join(bench.notes[name]) or 'no crash, no failed request, no wrong answer'}")
    if options.json:
        shutil.copyfile(options.results / f"{'guests' if options.guests else 'peers'}.json", options.json)


def _add_options(parser: argparse.ArgumentParser) -> None:
    every = [*PEERS, *(guest.name for guest in GUESTS.values())]
    parser.add_argument("--servers", type=_some_of(every), metavar="NAME,...", help=", ".join(every))
    parser.add_argument("--guests", action="store_true", help="servers with their own cache and with a PrefixCache")
    parser.add_argument("--scenarios", type=_some_of(NAMES), metavar="NAME,...", help=", ".join(NAMES))
    parser.add_argument("--model", help="random (default), demo, tiny, or a folder in mlx-lm's format")
    parser.add_argument(
        "--venvs",
        type=Path,
        default=cache_home() / "peers",
        metavar="FOLDER",
        help="folder with the environments of the servers; missing ones are made (default: the user's cache folder)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def _some_of(known: Sequence[str]) -> Any:
    def names(given: str) -> list[str]:
        found = [name.strip() for name in given.split(",")]
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known. Known: {', '.join(known)}")
        return found

    return names


if __name__ == "__main__":
    # Stop the servers when this process ends, also on SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
