"""Every file in examples/ runs as it is, on a random model, and prints what its docstring promises."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.stores.redis_server import Server, redis  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"

#: What each example prints, as a pattern; the groups are counts of tokens or bytes.
PRINTED = {
    "disk_and_restart": r"first rule\? 0 of .*last rule\? (\d{3}) of (\d{3}) tokens came from prefixes/",
    "explain_broken_prefix": r"first:\n(6) of 124 .*hint: .*last:\n(114) of 124 ",
    "lru_prompt_cache": r"LRUPromptCache: \[0, (\d{3}), .*RadixPromptCache: \[0, (\d{3}), ",
    "many_at_once": r"\n(936) of (1375) prompt tokens",
    "own_loop": r"Rome\? (0) of .*Paris\? (\d{3}) of .*nodes",
    "own_policy": r"  lru +(\d+).*KeepPopular +(\d+).*belady",
    "serve_and_ask": r"Rome\? (0) of .*Paris\? (\d{3}) of ",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, monkeypatch)
    found = re.search(PRINTED[name], capsys.readouterr().out, re.DOTALL)
    assert found is not None
    less, more = map(int, found.groups())
    assert less <= more


def test_the_example_of_redis_shares_through_a_server(
    redis: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("redis_store", monkeypatch, redis.url)
    assert re.search(r"first machine: 0 of .*\nsecond machine: 9\d\d of 9\d\d tokens", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="usage: "):
        run("redis_store", monkeypatch)


def test_every_example_is_run_and_begins_with_what_it_shows() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "redis_store"}
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith('"""')
        assert 15 <= text.count("\n") <= 60
