"""The commands mrc, synth and advise: what they print, write and refuse."""

import json

import pytest

from runner.traces.synthesis import Synth, synthesize
from runner.traces.trace_formats import mooncake_bytes

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
    code, _, err = command("mrc", paths[0])
    assert code == 0
    assert "note: some or all arrival times are synthetic" in err


def test_mrc_prints_a_table_and_writes_json_and_plot(tmp_path, command, trace, config) -> None:
    json_file, plot_file = tmp_path / "c.json", tmp_path / "c.svg"
    code, out, _ = command("mrc", trace, "--model-config", config, "--json", json_file, "--plot", plot_file)
    assert (code, "GiB" in out) == (0, True)
    assert "Block hit ratio: share of prompt blocks found in the cache." in out
    document = json.loads(json_file.read_text())
    # 2 (keys, values) x 2 layers x 4 heads x 16 elements x 2 bytes x 512 tokens.
    assert document["block_bytes"] == 512 * 512
    ratios = [row["block_hit_ratio"] for row in document["rows"]]
    assert ratios == sorted(ratios)
    assert ratios[-1] == document["infinite_block_hit_ratio"]
    assert [row["block_error"] for row in document["rows"]] == [None] * len(ratios)
    assert plot_file.read_text().startswith("<?xml")


def test_sampled_mrc_states_its_error(command, trace) -> None:
    code, out, _ = command("mrc", trace, "--sample", 0.5)
    assert (code, "standard" in out) == (0, True)
    code, _, err = command("mrc", trace, "--sample", 0.01)
    assert (code, "note: the sample is too small for a standard error" in err) == (0, True)


def test_advise_reports_and_writes_a_page(tmp_path, command, trace, config) -> None:
    page, json_file = tmp_path / "a.html", tmp_path / "a.json"
    code, out, _ = command(
        "advise", trace, "--model-config", config, "--budget-gib", 0.05, "--prefill-tokens-per-s", 1000,
        "--html", page, "--json", json_file,
    )  # fmt: skip
    assert code == 0
    for phrase in ("can save at most", "the knee", "90% of savings", "GiB"):
        assert phrase in out
    assert page.read_text().startswith("<!doctype html>")
    assert "<svg" in page.read_text()
    budgets = json.loads(json_file.read_text())["budgets"]
    assert budgets[-1]["capacity_blocks"] == int(0.05 * (1 << 30) // (512 * 512))
    assert budgets[-1]["saved_s"] > 0


def test_trace_without_reuse_has_no_marks_at_zero(tmp_path, command) -> None:
    trace, page, picture = tmp_path / "t.jsonl", tmp_path / "a.html", tmp_path / "c.svg"
    lines = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [index]} for index in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command("advise", trace, "--html", page)[0] == command("mrc", trace, "--plot", picture)[0] == 0
    assert "90% of savings" not in page.read_text().partition("<svg")[2]
    assert "knee" not in picture.read_text()
    assert "infinite cache" in picture.read_text()


def test_advise_takes_the_best_policy_from_a_simulation(tmp_path, command, trace) -> None:
    rows = [
        {"trace": "small", "policy": policy, "capacity_blocks": 100, "token_hit_ratio": ratio}
        for policy, ratio in (("lru", 0.1), ("turn", 0.2), ("belady", 0.5))
    ]
    simulation = tmp_path / "rows.json"
    simulation.write_text(json.dumps({"rows": rows}))
    code, out, _ = command("advise", trace, "--simulation", simulation)
    assert code == 0
    assert "Best policy at 100 blocks: turn, 20.0% of prefill saved, 10.0 points more than lru" in out
    for wrong, message in (
        ({"trace": "other"}, "no row of trace 'small'"),
        ({"token_hit_ratio": "x"}, "wanted rows of radixcache simulate"),
    ):
        simulation.write_text(json.dumps({"rows": [{**rows[0], **wrong}]}))
        code, _, err = command("advise", trace, "--simulation", simulation)
        assert code == 2
        assert message in err


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
