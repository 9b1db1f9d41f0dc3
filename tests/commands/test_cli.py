"""The command line answers mistakes with one line and exit code 2, and results with a table and exit code 0 or 1."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixcache.layers.layout import Layout
from runner.commands.replay import ReplayProgress
from runner.replay import caches


def replay(talks, *more):
    return ("replay", "--model", "tiny", "--conversations", talks, "--max-tokens", 4, *more)


def last_line(text):
    return text.splitlines()[-1]


def test_a_missing_or_unknown_command_is_one_line_and_exit_code_2(command):
    for arguments in ([], ["reply"]):
        code, stdout, stderr = command(*arguments)
        assert (code, stdout, len(stderr.splitlines()), stderr[:7]) == (2, "", 1, "error: ")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"messages": []}', ":1: the conversation is empty"),
        ("", "the file is empty"),
        ("not json\n", ":1"),
        ('{"messages": [{"role": "user"}]}', "content"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x" * 40_000}]}),
            "do not fit the model's context of 32,768 tokens",
        ),
    ],
)
def test_a_bad_conversation_file_is_one_line_and_exit_code_2(command, tmp_path, content, found):
    path = tmp_path / "talk.jsonl"
    path.write_text(content)
    code, stdout, stderr = command(*replay(path))
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert stderr.startswith("error: ")
    assert f"{path.name}" in stderr
    assert found in stderr


def test_skip_bad_leaves_out_and_counts_what_cannot_be_replayed(command, talks, tmp_path):
    with talks.open("a") as file:
        file.write('{"messages": "none"}\n')
        file.write(json.dumps({"messages": [{"role": "user", "content": "x" * 40_000}]}) + "\n")
    out = tmp_path / "out.json"
    code, _, stderr = command(*replay(talks, "--cache", "single, none,single", "--skip-bad", "--json", out))
    assert code == 0
    assert "note: 1 record skipped, the first: " in stderr
    assert "note: 1 of 5 requests skipped" in stderr
    document = json.loads(out.read_text())
    assert document["skipped_requests"] == 1
    assert [run["cache"] for run in document["runs"]] == ["single", "none"]


def test_a_replay_prints_a_table_and_a_sentence_and_writes_what_was_asked_for(command, talks, tmp_path):
    json_file, plot_file = tmp_path / "out.json", tmp_path / "out.png"
    arguments = replay(talks, "--json", json_file, "--plot", plot_file, "--seed", 3)
    code, stdout, stderr = command(*arguments)
    assert code == 0, stderr
    for cache in ("none", "single", "mlx-lm", "radix"):
        assert f"\n{cache} " in stdout
        assert cache in stderr, "a progress bar per run"
    assert "Every answer is the same as without a cache." in stdout
    document = json.loads(json_file.read_text())
    assert [run["cache"] for run in document["runs"]] == ["none", "single", "mlx-lm", "radix"]
    assert [run["answers_equal"] for run in document["runs"]] == [4, 4, 4, 4]
    assert [len(run["rows"]) for run in document["runs"]] == [4, 4, 4, 4]
    assert (document["seed"], document["model"], document["interrupted"]) == (3, "tiny:llama", False)
    assert document["command"].startswith("radixcache replay --model tiny")
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_a_tree_goes_to_stdout_and_the_table_beside_it(command, talks):
    code, stdout, stderr = command(*replay(talks, "--cache", "radix", "--tree", "-"))
    assert (code, "policy lru, budget" in stdout, "\nradix " in stdout, "\nradix " in stderr) == (0, True, False, True)


def test_a_replay_of_several_users_at_a_time_gives_the_replies_of_one_after_the_other(command, talks, tmp_path):
    alone, together, plot, tree = (tmp_path / name for name in ("1.json", "2.json", "out.png", "tree.json"))
    assert command(*replay(talks, "--cache", "radix", "--json", alone))[0] == 0
    code, stdout, stderr = command(*replay(talks, "--parallel", 2, "--json", together, "--plot", plot, "--tree", tree))
    assert code == 0, stderr
    assert "2 users at a time got 16 tokens in " in stdout
    (serial,), (parallel, beside, _) = (json.loads(path.read_text())["runs"] for path in (alone, together))
    # A row has the figures that are measured for as many users.
    first, other = parallel["rows"][0].keys(), beside["rows"][0].keys()
    assert first - other == {"waited_ms"}
    assert other - first == {"begin_ms", "close_ms", "live_bytes", "paged_bytes", "allocated_bytes"}
    assert {"users_at_a_time", "token_ms_p50"} <= parallel.keys()
    assert "prefill_s" not in parallel
    assert "One at a time, with " in stdout
    assert "Every answer is the same as without a cache." in stdout
    assert [row["output_hash"] for row in beside["rows"]] == [row["output_hash"] for row in serial["rows"]]
    assert [row["cached_tokens"] for row in beside["rows"]] == [row["cached_tokens"] for row in serial["rows"]]
    assert beside["users_at_a_time"] == 1
    assert [row["output_hash"] for row in parallel["rows"]] == [row["output_hash"] for row in serial["rows"]]
    assert [row["prompt_tokens"] for row in parallel["rows"]] == [row["prompt_tokens"] for row in serial["rows"]]
    assert [row["user"] for row in parallel["rows"]] == [row["user"] for row in serial["rows"]]
    assert (parallel["users_at_a_time"], parallel["output_tokens"]) == (2, 16)
    assert 0 < parallel["peak_cache_bytes"] <= 128 << 20
    assert json.loads(together.read_text())["options"]["step_size"] == 1024
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(tree.read_text())


def test_what_had_finished_before_a_request_that_the_device_cannot_hold_is_kept(command, tmp_path, monkeypatch):
    path, out = tmp_path / "long.json", tmp_path / "out.json"
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    path.write_text(json.dumps({"messages": [*turns, {"role": "user", "content": "x" * 2000}]}))
    monkeypatch.setattr(Layout, "device_bytes", lambda _: 0)
    code, stdout, stderr = command(*replay(path), "--parallel", 2, "--budget-mib", 2, "--json", out)
    assert code == 2
    assert "1 user at a time got 4 tokens" in stdout
    assert stderr.splitlines()[-2] == "interrupted: 1 of 2 requests had finished."
    wanted = r"error: one request needs \d+\.\d MiB; the device can spare \d+\.\d MiB\."
    assert re.fullmatch(wanted, last_line(stderr))
    written = json.loads(out.read_text())
    assert (written["interrupted"], len(written["runs"][0]["rows"])) == (True, 1)


def test_differing_answers_are_named_and_exit_code_1(command, talks, monkeypatch):
    right = caches.common_length
    monkeypatch.setattr(caches, "common_length", lambda *pair: min(right(*pair) + 9, min(map(len, pair))))
    code, stdout, stderr = command(*replay(talks, "--cache", "none,single"))
    assert code == 1
    assert "Answers DIFFER from those without a cache" in stdout
    assert last_line(stderr).startswith("check failed: single, request ")


def stopped_at(monkeypatch, count, number):
    """Let a signal come when so many requests are done."""
    done, seen = ReplayProgress.request_done, []

    def request_done(self, cache, prompt_tokens):
        done(self, cache, prompt_tokens)
        seen.append(cache)
        if len(seen) == count:
            signal.raise_signal(number)

    monkeypatch.setattr(ReplayProgress, "request_done", request_done)


@pytest.mark.parametrize(
    ("number", "more", "done", "finished", "said"),
    [
        *(
            (each, ("--cache", "none,single"), 4, 2, "\nnone ")
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ),
        (signal.SIGINT, ("--parallel", 2), 3, 3, "2 users at a time got 12 tokens"),
    ],
)
def test_ctrl_c_and_other_signals_to_stop_print_what_had_finished(
    command, talks, tmp_path, monkeypatch, number, more, done, finished, said
):
    stopped_at(monkeypatch, done, number)
    out = tmp_path / "out.json"
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        code, stdout, stderr = command(*replay(talks, *more, "--json", out))
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    assert last_line(stderr) == f"interrupted: {finished} of 4 requests had finished."
    assert said in stdout
    document = json.loads(out.read_text())
    assert document["interrupted"] is True
    assert {len(run["rows"]) for run in document["runs"]} == {finished}


def test_ctrl_c_before_anything_finished_is_one_line_and_130(command, talks, monkeypatch):
    monkeypatch.setattr("runner.models.load.load_model", lambda spec: signal.raise_signal(signal.SIGINT))
    code, stdout, stderr = command(*replay(talks))
    assert (code, stdout, stderr) == (130, "", "interrupted: nothing had finished.\n")


def test_blas_advice_is_given_once_on_stderr(command, talks, monkeypatch):
    monkeypatch.setattr("runner.BLAS_ADVICE", "install OpenBLAS.")
    code, stdout, stderr = command(*replay(talks, "--cache", "none"))
    assert code == 0
    assert stderr.count("note: install OpenBLAS.") == 1
    assert "OpenBLAS" not in stdout


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["replay", "--cache", "redis"]])
def test_help_and_mistakes_do_not_wait_for_mlx(arguments):
    code = (
        "import sys, runner.cli\n"
        "try:\n    runner.cli.main(sys.argv[1:])\n"
        "finally:\n    heavy = {'mlx.core', 'mlx_lm', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert "AssertionError" not in done.stderr


def test_a_full_disk_and_a_reader_that_went_away_are_one_line_or_none(talks, tmp_path):
    """One process for all of it: each starts MLX anew."""
    path = tmp_path / "out.json"
    code = (
        "import os, resource, sys, runner.cli\n"
        "def run(*arguments):\n"
        "    try:\n        runner.cli.main(arguments)\n"
        "    except SystemExit as end:\n        print('exit', end.code, file=sys.stderr)\n"
        "stdout, tiny = os.dup(1), ('--model', 'tiny')\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nrun('explain', sys.argv[1], *tiny)\n"
        "reading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)\n"
        "run('tree', sys.argv[1], *tiny)\nrun('--version', '--verbose')\n"
        "os.dup2(stdout, 1)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "for command, option in (('explain', '--json'), ('tree', '--out')):\n"
        "    run(command, sys.argv[1], option, sys.argv[2], *tiny)\n"
    )
    command = [sys.executable, "-c", code, str(talks), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith(("error", "exit", "Traceback"))]
    full = f"error: {path}: cannot be written (File too large)."
    if Path("/dev/full").exists():
        assert said[:2] == ["error: the output: cannot be written (No space left on device).", "exit 2"]
    assert said[2:] == ["exit 0", "exit 0", full, "exit 2", full, "exit 2"]
    assert not path.exists()
