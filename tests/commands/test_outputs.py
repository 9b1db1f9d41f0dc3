"""Where results go: no input is overwritten, an output that fails costs no other, terminals of any kind will do."""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.cli import main
from runner.commands import inputs, outputs
from runner.commands.outputs import machine, versions
from runner.text import figures_table
from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace_formats import compact_bytes

Command = Callable[..., tuple[int, str, str]]
PROGRAM = [sys.executable, "-m", "radixcache"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_bytes(compact_bytes(synthesize(Synth(requests=60))))
    return path


# No input is overwritten


@pytest.mark.parametrize(("name", "option", "ending"), [("advise", "--json", "jsonl"), ("simulate", "--plot", "svg")])
def test_an_output_is_not_an_input(command: Command, tmp_path: Path, name: str, option: str, ending: str) -> None:
    path, link, hard = (tmp_path / f"{each}.{ending}" for each in ("t", "link", "hard"))
    path.write_text("not even a trace\n")
    link.symlink_to(path)
    hard.hardlink_to(path)
    for output in (path, tmp_path / "." / path.name, link, hard):
        code, out, err = command(name, path, option, output)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {option} {output} is also an input, and would be overwritten.")
        assert path.read_text() == "not even a trace\n"


def test_so_it_is_with_every_other_input(command: Command, tmp_path: Path, trace: Path, talks: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config, inside, saved = tmp_path / "config.json", folder / "a.json", tmp_path / "tree.json"
    for path in (config, inside, saved):
        path.write_text("{}")
    for arguments in (
        ("simulate", trace, "--capacity-blocks", 5, "--model-config", config, "--json", config),
        ("advise", folder, "--json", inside),
        ("tree", saved, "--out", saved),
        ("tree", talks, "--model", tmp_path, "--out", config),
        ("explain", talks, "--json", talks),
        ("replay", "--conversations", talks, "--json", talks),
    ):
        before = {path: path.read_bytes() for path in (config, inside, saved, talks, trace)}
        code, out, err = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert "is also an input, and would be overwritten" in err, arguments
        assert {path: path.read_bytes() for path in before} == before


def test_two_outputs_on_one_path_are_refused_except_for_a_device(command: Command, trace: Path, tmp_path: Path) -> None:
    both = tmp_path / "out"
    code, out, err = command("advise", trace, "--json", both, "--plot", tmp_path / "." / "out")
    assert (code, out) == (2, "")
    assert err == f"error: --json and --plot are both {both}; wanted a file for each.\n"
    assert not both.exists()
    assert command("advise", trace, "--json", "/dev/null", "--plot", "/dev/null")[0] == 0


def test_synth_does_not_write_over_a_file(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("everything")
    code, out, err = command("synth", path, "--requests", 5)
    assert (code, out, err) == (2, "", f"error: {path}: exists already. Remove it, or name another file.\n")
    assert path.read_text() == "everything"
    path.unlink()
    assert command("synth", path, "--requests", 5)[0] == 0
    assert path.read_bytes().startswith(b'{"format":"radixcache-trace"')


# Pictures need matplotlib, and nothing else does


def test_the_library_and_the_commands_work_without_matplotlib(trace: Path) -> None:
    code = (
        "import sys\nsys.modules |= dict.fromkeys(('matplotlib', 'redis', 'ray'))\n"
        "import radixcache, runner.cli\nfrom radixcache import *\n"
        "for arguments in (['--help'], ['simulate', sys.argv[1], '--capacity-blocks', '20', '--policy', 'lru']):\n"
        "    try:\n        runner.cli.main(arguments)\n    except SystemExit as end:\n        assert not end.code\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Token hits: " in done.stdout


def test_a_picture_without_matplotlib_is_one_line_before_anything_runs(
    command: Command, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = '--plot draws with matplotlib, which is not installed: pip install "radixcache[plot]".'
    assert command("advise", trace, "--plot", "-") == (2, "", f"error: {message}\n")


# Each output for itself


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_does_not_stop_the_other_outputs(command: Command, trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "x.svg"
    code, out, err = command("advise", trace, "--json", "/dev/full", "--plot", plot)
    assert code == 2
    assert "A prefix cache can save" in out
    assert "error: /dev/full: cannot be written (No space left on device).\n" in err
    assert plot.read_bytes().lstrip().startswith(b"<?xml")
    with open("/dev/full", "wb") as full:
        arguments = ["advise", str(trace), "--json", str(tmp_path / "x.json")]
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2
    assert b"error: the output: cannot be written (No space left on device).\n" in done.stderr
    assert json.loads((tmp_path / "x.json").read_bytes())["trace"] == "t"


def test_a_dash_is_stdout_and_what_is_for_people_goes_to_stderr(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["advise", str(trace), "--json", "-"])
    done = capfdbinary.readouterr()
    assert (stopped.value.code, json.loads(done.out)["trace"]) == (0, "t")
    assert b"A prefix cache can save" in done.err
    assert not (tmp_path / "-").exists()


def test_a_dash_is_stdin(command: Command, trace: Path, talks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, path, found in (
        (("advise", "-"), trace, "stdin: 60 requests"),
        (("tree", "-", "--model", "tiny"), talks, "tokens"),
    ):
        inputs._from_stdin.cache_clear()
        with path.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            code, out, _ = command(*arguments)
        assert (code, found in out) == (0, True)


# Terminals and names of any kind


def test_a_terminal_that_knows_few_letters_gets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "aéb"))
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with pytest.raises(SystemExit) as stopped:
        main(["tree", str(many), "--model", "tiny"])
    assert stopped.value.code == 0
    assert b"|- [" in shown.getvalue()
    shown.getvalue().decode("ascii")


def test_a_name_that_is_no_utf_8_is_a_name(command: Command, trace: Path, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    try:
        Path(name).write_bytes(trace.read_bytes())
    except OSError:
        pytest.skip("this file system takes no such names")
    out = tmp_path / "out.json"
    code, shown, _ = command("advise", name, "--json", out, "--plot", tmp_path / "out.svg")
    assert code == 0
    assert "caf\\udce9: 60 requests" in shown
    assert json.loads(out.read_bytes())["trace"] == "caf\\udce9"
    code, _, err = command("advise", name + "x")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> None:
    monkeypatch.setattr(outputs, "PIPE_COLUMNS", width)
    figures = ["10,000", "12,345,678", "98.7", "12,345", "123,456", "1,234.5", "1,234.5", "12,345.6", "123,456"]
    titles = ["requests", "prompt tokens", "cached tokens %", "TTFT p50 ms", "TTFT p95 ms", "prefill s", "decode s"]
    cells = zip([*titles, "peak cache MiB", "evicted"], figures, strict=True)
    outputs.Outputs({}).show(figures_table([["cache", "radix"], *cells], names=("cache",)))
    shown = capsys.readouterr().out
    assert all(figure in shown.split() for figure in figures)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("peak cache MiB" in shown) == (width == 60), "rows become columns"


def test_a_table_whose_rows_do_not_fit_beside_each_other_becomes_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "PIPE_COLUMNS", 60)
    columns = [[f"figure {number}", *(f"{number}{row}.75" for row in range(100, 109))] for number in range(9)]
    outputs.Outputs({}).show(figures_table([["policy", *["belady-bypass"] * 9], *columns], names=("policy",)))
    shown = capsys.readouterr().out
    assert (shown.count("belady-bypass"), shown.count("figure 8"), shown.count("───") > 0) == (9, 3, True)
    assert max(map(len, shown.splitlines())) <= 60
    assert {cell for _, *cells in columns for cell in cells} <= set(shown.split())


@pytest.mark.parametrize("sizes", ["", "--bytes-per-token 2048"])
def test_tables_over_traces_fit_60_columns(
    command: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, sizes: str
) -> None:
    monkeypatch.setattr(outputs, "PIPE_COLUMNS", 60)
    for arguments in ("simulate --capacity-blocks 50,20000 --policy lru,belady", "advise"):
        name, *options = f"{arguments} {sizes}".split()
        code, out, _ = command(name, trace, *options)
        assert (code, "─" * 30 in out) == (0, True), out
        table = out.partition("─" * 30)
        assert len(table[0].splitlines()[-1]) <= 60, out


# Signals


WAITING = """
import time
from policies import LRU
class Slow(LRU):
    def inserted(self, entry):
        super().inserted(entry)
        time.sleep(0.03)
"""


def workers_of(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [each for each in psutil.Process(process.pid).children() if "spawn_main" in " ".join(each.cmdline())]
        if len(found) >= count and all(each.cpu_times().user > 0.5 for each in found):
            return found
        time.sleep(0.05)
    raise AssertionError("no workers")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_when_the_process_that_started_them_is_stopped(trace: Path, number: int) -> None:
    (trace.parent / "mine.py").write_text(WAITING)
    more = ["--capacity-blocks", "50", "--policy", "lru,mine:Slow,mine:Slow", "--jobs", "2"]
    with subprocess.Popen(
        [*PROGRAM, "simulate", str(trace), *more], cwd=trace.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        workers = workers_of(process, 2)
        process.send_signal(number)
        # The pipe ends once nobody else holds it.
        _, err = process.communicate(timeout=60)
    assert not psutil.wait_procs(workers, timeout=60)[1]
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert err.decode().splitlines()[-1].startswith("interrupted: ")


# A policy of the user's that fails


def test_a_policy_that_raises_is_one_line(
    command: Command, trace: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(
        "from policies import LRU\nclass Bad(LRU):\n    def evicted(self, *_):\n        raise KeyError('no')\n"
    )
    monkeypatch.chdir(tmp_path)
    policy = ("--policy", "bad:Bad")
    many = tmp_path / "many.jsonl"
    talk = talks.read_text().replace("Which", "Hello N. " * 30).replace("ann", "aN").replace("bob", "bN")
    many.write_text("".join(talk.replace("N", str(number)) for number in range(4)))
    model = ("--model", "tiny")
    for arguments in (
        ("simulate", trace, "--capacity-blocks", 20, *policy),
        ("tree", many, *model, "--budget-mib", 0.5, *policy),
        ("explain", many, *model, "--budget-mib", 0.5, *policy),
        ("replay", "--conversations", many, *model, "--budget-mib", 2, "--cache", "none,radix", *policy),
    ):
        code, _, err = command(*arguments)
        assert code == 2, arguments
        last = err.splitlines()[-1]
        assert last.startswith(f"error: --policy: policy Bad: evicted() raised KeyError('no') ({tmp_path}"), arguments
        assert "Traceback" not in err


# advise


def test_an_interrupt_is_said(command: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.simulate.grid.run_locally", interrupted)
    json_file = tmp_path / "a.json"
    code, out, err = command("advise", trace, "--capacity-blocks", 100, "--json", json_file)
    assert code == 130
    assert err.splitlines()[-1] == "interrupted: policies were not compared."
    assert "LRU budget for" in out, "what LRU saves was printed before"
    assert json.loads(json_file.read_text())["interrupted"] is True
    assert "Interrupted: policies were not compared." in out


def test_long_traces_are_sampled(
    command: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.simulate import advice

    monkeypatch.setattr(advice, "WHOLE_REFS", 1_000)
    monkeypatch.setattr(advice, "SAMPLE_REFS", 500)
    out_file = tmp_path / "a.json"
    code, out, _ = command("advise", trace, "--capacity-blocks", 300, "--jobs", 1, "--json", out_file)
    assert code == 0
    assert "Policies were compared on 3 samples of " in out
    assert out.splitlines()[-1].startswith("PrefixCache(model, budget_bytes=19_200 * bytes_per_token, policy=")
    document = json.loads(out_file.read_text())
    assert document["paste"] == out.splitlines()[-1]
    assert {each["policy"] for each in document["samples"]} > {"lru", "gdsf", "benefit"}
    code, out, _ = command("advise", trace, "--capacity-blocks", 300, "--jobs", 1, "--full")
    assert code == 0
    assert "Compared on" not in out
    assert "belady, which knows the future, reaches" in out
    code, out, _ = command("advise", trace, "--capacity-blocks", 1_000_000)
    assert "All that can be saved fits this budget: no policy saves more than LRU." in out


def test_the_machine_is_described_without_its_name() -> None:
    described = machine()
    assert described["logical_cores"] >= 1
    assert described["memory_bytes"] > 1 << 28
    assert described["processor"]
    assert platform.node() not in described.values()
    assert set(versions()) == {"python", "radixcache", "mlx", "mlx-lm", "numpy", "transformers"}
