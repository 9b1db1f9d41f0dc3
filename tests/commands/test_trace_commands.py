"""The commands synth and advise: what they print, write and refuse."""

import json

import pytest

from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace_formats import mooncake_bytes
from runner.traces.trace_reader import read_trace

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def trace(tmp_path):
    """A small made-up trace in Mooncake's format."""
    path = tmp_path / "small.jsonl"
    path.write_bytes(mooncake_bytes(synthesize(Synth(requests=300, block_tokens=512))))
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_synth_is_the_same_for_the_same_seed_and_says_that_it_is_synthetic(tmp_path, command) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        code, out, _ = command("synth", path, "--requests", 50, "--seed", seed)
        assert code == 0
        assert "50 requests" in out
        assert "synthetic" in out
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    code, _, err = command("advise", paths[0])
    assert code == 0
    assert "note: some or all arrival times are synthetic" in err


def test_synth_takes_shares_and_rates_of_the_traffic(tmp_path, command) -> None:
    kinds, minutes = {}, {}
    for name, more in (("chats", (0,)), ("agents", (1, "--sessions-per-hour", 10))):
        path = tmp_path / name
        assert command("synth", path, "--requests", 200, "--block-tokens", 32, "--agent-share", *more)[0] == 0
        trace = read_trace(path)
        kinds[name] = {request.kind for request in trace.requests}
        minutes[name] = trace.requests[-1].time_ms
        assert trace.block_tokens == 32
    assert kinds == {"chats": {"chat"}, "agents": {"agent"}}
    assert minutes["agents"] > minutes["chats"]


def test_advise_reports_and_writes_the_curve(tmp_path, command, trace, config) -> None:
    picture, json_file = tmp_path / "a.svg", tmp_path / "a.json"
    code, out, _ = command(
        "advise", trace, "--model-config", config, "--budget-gib", 0.05, "--prefill-tokens-per-s", 1000,
        "--plot", picture, "--json", json_file,
    )  # fmt: skip
    assert code == 0
    for phrase in ("can save at most", "the knee", "90% of savings", "GiB"):
        assert phrase in out
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert all(name in drawn for name in ("the knee", "99% of savings", "your budget"))
    document = json.loads(json_file.read_text())
    # 2 (keys, values) x 2 layers x 4 heads x 16 elements x 2 bytes x 512 tokens.
    assert document["block_bytes"] == 512 * 512
    budgets = document["budgets"]
    assert budgets[-1]["capacity_blocks"] == int(0.05 * (1 << 30) // (512 * 512))
    assert budgets[-1]["saved_s"] > 0
    ratios = [row["block_hit_ratio"] for row in document["curve"]]
    assert ratios == sorted(ratios)
    assert ratios[-1] == document["savable_block_ratio"]
    shown = {row["capacity_blocks"]: row["token_hit_ratio"] for row in document["curve"]}
    assert {each["capacity_blocks"]: each["token_hit_ratio"] for each in budgets[:4]}.items() <= shown.items()


def test_trace_without_reuse_has_no_marks_at_zero(tmp_path, command) -> None:
    trace, picture = tmp_path / "t.jsonl", tmp_path / "c.svg"
    lines = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [index]} for index in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command("advise", trace, "--plot", picture)[0] == 0
    assert "knee" not in picture.read_text()
    assert "infinite cache" in picture.read_text()


def test_advise_compares_policies_with_the_optimum_and_with_checkpoints_where_there_are_some(tmp_path, command) -> None:
    trace, json_file = tmp_path / "t.jsonl", tmp_path / "a.json"
    trace.write_bytes(mooncake_bytes(synthesize(Synth(requests=60, block_tokens=512))))
    given = ("--bytes-per-token", 100, "--budget-gib", 0.001, "--json", json_file)
    code, out, _ = command("advise", trace, *given)
    assert code == 0
    assert "; belady, which knows the future, reaches" in out
    spans = json.loads(json_file.read_text())["best_policy"]
    assert spans["bound"][1] >= spans["token_hit_ratio"] > 0
    code, out, _ = command("advise", trace, *given, "--bytes-per-checkpoint", 1_000_000)
    assert code == 0
    assert "belady" not in out
    assert json.loads(json_file.read_text())["best_policy"]["token_hit_ratio"] < spans["token_hit_ratio"]
