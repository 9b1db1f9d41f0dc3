"""A report's figures follow from its rows, and its sentence says no more than they do."""

import io
import json
import os
import threading

import pytest
from rich.console import Console

from runner.files import require_writable, write_atomically, write_json
from runner.replay.replayer import AnswerDifference, CacheRun
from runner.replay.report import Report, replay_picture, total_ratio
from runner.replay.servers import RequestRow, output_hash


def row(ttft_ms=100.0, *, answer=(1, 2), cached_tokens=0, peak_bytes=1 << 20, **more):
    about = {"user": "ann", "conversation_id": "a", "turn": 0, "reason": None, "done_reason": "length"}
    tokens = {"prompt_tokens": 200, "matched_tokens": cached_tokens, "cached_tokens": cached_tokens}
    times = {"ttft_ms": ttft_ms, "begin_ms": 1.0, "decode_ms": 50.0, "close_ms": 2.0}
    held = {"live_bytes": peak_bytes, "paged_bytes": 0, "peak_bytes": peak_bytes, "allocated_bytes": peak_bytes}
    output = {"output_tokens": len(answer), "output_hash": output_hash(answer)}
    return RequestRow(**{**about, **tokens, **times, **held, **output, **more})


def run(cache, ttft_ms=100.0, *, requests=4, evictions=0, **more):
    return CacheRun(cache, tuple(row(ttft_ms, **more) for _ in range(requests)), evictions, wall_s=1.0)


def printed(report):
    output = io.StringIO()
    Console(width=140, file=output).print(report.table())
    return output.getvalue()


def test_totals_percentiles_and_peaks_come_from_the_rows():
    figures = [(100.0, 10), (200.0, 40), (300.0, 30), (1000.0, 20)]
    rows = tuple(row(ttft_ms, cached_tokens=50, peak_bytes=peak_bytes) for ttft_ms, peak_bytes in figures)
    summary = Report([CacheRun("radix", rows, evictions=3, wall_s=2.5)]).summaries[0]
    assert (summary.requests, summary.prompt_tokens, summary.cached_tokens) == (4, 800, 200)
    assert (summary.cached_share, summary.ttft_ms_p50, summary.ttft_ms_p95) == (0.25, 250.0, pytest.approx(895.0))
    assert (summary.prefill_s, summary.decode_s) == (pytest.approx(1.6), pytest.approx(0.2))
    assert (summary.begin_s, summary.close_s) == (pytest.approx(0.004), pytest.approx(0.008))
    assert (summary.peak_cache_bytes, summary.peak_allocated_bytes, summary.evictions) == (40, 40, 3)


def test_answers_are_counted_against_the_run_without_a_cache():
    radix = CacheRun("radix", (row(), row(answer=(9, 9)), row()), 0, 1.0)
    report = Report([run("none", requests=3), radix])
    assert [summary.answers_equal for summary in report.summaries] == [3, 2]
    assert [(cache, index) for cache, index, _ in report.differences()] == [("radix", 1)]
    assert "2/3" in printed(report)
    assert report.sentence().endswith("Answers DIFFER from those without a cache: 1 of 3 with radix.")


def test_with_fewer_bits_at_rest_answers_may_part_and_the_gap_says_how_near_the_tokens_were():
    radix = CacheRun("radix", (row(), row(answer=(9, 9)), row()), 0, 1.0)
    partings = [AnswerDifference("radix", 1, 0.25)]
    report = Report([run("none", requests=3), radix], partings=partings, stored_bits=8)
    assert report.differences() == []
    assert report.sentence().endswith(
        "With 8 bits at rest, 1 of 3 answers differ from those without a cache, at tokens whose two highest logits are "
        "0.25 to 0.25 apart."
    )
    assert report.document()["partings"] == [{"cache": "radix", "index": 1, "gap": 0.25}]
    single = CacheRun("single", radix.rows, 0, 1.0)
    assert len(Report([run("none", requests=3), single], stored_bits=8).differences()) == 1


def test_without_a_reference_nothing_is_called_equal():
    report = Report([run("mlx-lm"), run("radix", 50.0)])
    assert [summary.answers_equal for summary in report.summaries] == [None, None]
    assert report.differences() == []
    assert "none was not among the caches" in report.sentence()
    assert "Every answer is the same" not in report.sentence()


def test_the_closing_sentences_follow_from_the_table():
    single = CacheRun("single", tuple(row(250.0, cached_tokens=tokens) for tokens in [0, *[40] * 7]), 0, 1.0)
    mlx_lm = CacheRun("mlx-lm", tuple(row(200.0, cached_tokens=100, peak_bytes=3 << 20) for _ in range(8)), 5, 1.0)
    radix = run("radix", 100.0, cached_tokens=150, requests=8)
    said = Report([run("none", 1000.0, requests=8), single, mlx_lm, radix]).sentence()
    counts, times, held, meaning, answers = said.splitlines()
    assert counts == (
        "radix evaluated 400 of 1,600 prompt tokens; mlx-lm 800, single 1,320, none 1,600. These counts are the same "
        "on every machine."
    )
    assert times == (
        "All first tokens took 0.8 s with radix, 2.00 times as long with mlx-lm (95 % interval 2.00 to 2.00), "
        "2.50 times as long with single (95 % interval 2.50 to 2.50), "
        "10.00 times as long with none (95 % interval 10.00 to 10.00)."
    )
    assert held == "radix held at most 1 MiB, mlx-lm 3 MiB; the budget was too small for everything in mlx-lm only."
    assert meaning == (
        "single keeps only the latest conversation; mlx-lm keeps a copy of each conversation, too many for the budget; "
        "radix keeps a shared prefix once. This matters if users or branches with a common prefix take turns and "
        "memory is scarce: mlx-lm finds more in a larger budget. "
        "A cache does not make decode faster: radix took 0.4 s, mlx-lm 0.4 s, single 0.4 s, none 0.4 s."
    )
    assert answers == "Every answer is the same as without a cache."


@pytest.mark.parametrize(
    ("cached_tokens", "evictions", "said", "not_said"),
    [
        ((0, 100, 150), 0, "single keeps only the latest conversation; radix keeps a shared prefix once.", "a copy"),
        ((150, 100, 150), 5, "mlx-lm keeps a copy of each conversation, too many for the budget;", "single keeps"),
        ((150, 100, 150), 0, "A cache does not make decode faster", "a copy"),
        ((150, 150, 150), 5, "All caches find the same in these requests.", "This matters"),
        ((100, 160, 150), 5, "radix evaluated more than mlx-lm here.", "This matters"),
    ],
)
def test_the_sentences_give_a_reason_only_if_the_table_shows_it(cached_tokens, evictions, said, not_said):
    single, mlx_lm, radix = cached_tokens
    runs = [run("none"), run("single", cached_tokens=single), run("mlx-lm", cached_tokens=mlx_lm, evictions=evictions)]
    sentence = Report([*runs, run("radix", cached_tokens=radix)]).sentence()
    assert said in sentence
    assert not_said not in sentence


@pytest.mark.parametrize(
    ("mlx_lm_ms", "radix_ms", "requests", "said"),
    [
        (100.0, 200.0, 8, "mlx-lm (95 % interval 0.50 to 0.50). radix is slower than mlx-lm here."),
        (100.0, 100.0, 8, "These requests show no clear difference in time from mlx-lm."),
        (900.0, 100.0, 5, "9.00 times as long with mlx-lm. For an interval, 6 requests are needed."),
        (900.0, 100.0, 6, "9.00 times as long with mlx-lm (95 % interval 9.00 to 9.00).\n"),
    ],
)
def test_the_sentences_say_who_is_faster(mlx_lm_ms, radix_ms, requests, said):
    runs = [run("mlx-lm", mlx_lm_ms, requests=requests), run("radix", radix_ms, requests=requests)]
    assert said in Report(runs).sentence()


def test_the_interval_of_a_total_is_that_of_its_requests():
    assert total_ratio([2.0] * 30, [1.0] * 30) == (2.0, (2.0, 2.0))
    assert total_ratio([3.0] * 5, [1.0] * 5) == (3.0, None)
    # One request of ten has all of the gain: often it is not among the ones drawn.
    ratio, interval = total_ratio([11.0, *[1.0] * 9], [1.0] * 10)
    assert (ratio, interval[0]) == (2.0, 1.0)
    assert 4 <= interval[1] <= 5
    ours = CacheRun("radix", tuple(row(ms) for ms in [100.0] * 10 + [1000.0] * 5), 0, 1.0)
    said = Report([run("mlx-lm", 300.0, requests=15), ours]).sentence()
    assert "These requests show no clear difference in time from mlx-lm." in said
    assert said == Report([run("mlx-lm", 300.0, requests=15), ours]).sentence()


@pytest.mark.parametrize(
    ("mlx_lm", "radix", "said"),
    [
        (0, 0, "the budget had room for everything"),
        (3, 0, "the budget was too small for everything in mlx-lm only"),
        (0, 3, "the budget was too small for everything in radix only"),
        (1, 3, "the budget was too small for everything in both caches"),
    ],
)
def test_the_sentence_says_for_which_cache_the_budget_was_too_small(mlx_lm, radix, said):
    assert f"; {said}." in Report([run("mlx-lm", evictions=mlx_lm), run("radix", evictions=radix)]).sentence()


def test_the_sentence_of_one_cache_or_of_none():
    sentence = Report([run("radix")]).sentence()
    assert sentence.startswith("radix reached all first tokens in 0.4 s, with 0% of the prompt")
    sentence = Report([run("none", 300.0), run("single", 200.0)]).sentence()
    assert sentence.startswith("single reached all first tokens in 0.8 s")
    assert "none took 1.2 s" in sentence
    assert Report([run("none")]).sentence().endswith("There was no second cache to compare answers with.")
    assert Report([]).sentence() == "No request was answered by every cache."


def test_the_table_has_a_row_per_cache_with_units_in_its_header():
    radix = run("radix", 56.0, cached_tokens=150, peak_bytes=3 << 20, evictions=7)
    text = printed(Report([run("none", 1234.0), radix]))
    for word in ("cached", "tokens", "%", "p50", "p95", "ms", "prefill", "decode", "MiB", "evicted", "to none"):
        assert word in text.partition("───")[0]
    none, radix = (line for line in text.splitlines() if line.startswith(("none", "radix")))
    assert " ".join(none.split()) == "none 4 800 0.0 1,234 1,234 4.9 0.2 1.0 0 4/4"
    assert " ".join(radix.split()) == "radix 4 800 75.0 56 56 0.2 0.2 3.0 7 4/4"


def test_the_document_has_every_figure_and_survives_json():
    report = Report([run("none"), run("radix", reason="no checkpoint")])
    document = json.loads(json.dumps(report.document(model="tiny", seed=7)))
    assert (document["model"], document["seed"]) == ("tiny", 7)
    assert set(document) == {"runs", "model", "seed"}
    _, radix = document["runs"]
    assert list(radix) == [
        *("cache", "requests", "prompt_tokens", "cached_tokens", "ttft_ms_p50", "ttft_ms_p95", "prefill_s", "decode_s"),
        *("begin_s", "close_s", "wall_s", "peak_cache_bytes", "peak_allocated_bytes", "evictions", "answers_equal"),
        "rows",
    ]
    assert len(radix["rows"]) == radix["requests"] == 4
    assert (radix["rows"][0]["reason"], document["runs"][0]["rows"][0]["reason"]) == ("no checkpoint", None)
    assert radix["rows"][0]["output_hash"] == output_hash((1, 2))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"half")
    assert json.loads(path.read_text()) == {"a": 1}
    assert {each.name for each in tmp_path.iterdir()} == {"report.json", "plain"}


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    for content in (b"new", b"newer"):
        require_writable(link)
        write_atomically(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
    assert [each.name for each in target.parent.iterdir()] == ["target.json"]


def test_a_fifo_is_written_to_through_a_link_and_both_stay(tmp_path):
    fifo, given, read = tmp_path / "fifo", tmp_path / "given", []
    os.mkfifo(fifo)
    given.symlink_to(fifo)
    require_writable(given)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write_atomically(given, b"content")
    reader.join(timeout=30)
    assert (read, fifo.is_fifo(), given.is_symlink()) == ([b"content"], True, True)


def test_the_plot_is_a_png_of_its_full_size():
    content = replay_picture([run("none"), run("radix", 10.0)], title="two caches $x", budget_bytes=2 << 20)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1200, 960)
