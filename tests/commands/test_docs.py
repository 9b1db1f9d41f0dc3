"""The README and the docs are true: their Python runs, their commands exist and print what is shown."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main

from runner.cli import app
from runner.models.load import load_model
from tests.serve.serving import serving
from tests.stores.redis_server import Server, redis  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
#: Pages whose code needs more than a model.
NEED_SERVER, NEED_REDIS = {"clients"}, {"stores"}
#: A command behind a dollar sign, and the indented lines below it.
SHOWN = re.compile(r"^    \$ radixcache (.+)\n((?:    .+\n|\n(?=    ))+)", re.MULTILINE)
#: What the code of a page prints, as patterns.
PRINTED = {
    "explain": (r"^0 of ", r"diverged at 6 .* 'It is ': stored 'Tuesday", r"'resumed': 3, 'stored': 3, "),
    "many-at-once": (r"^(stop|length) 0 0$", r"^(stop|length) [1-9]\d+ 0$"),
    "own-loop": (r"0 0 None$", r"[1-9]\d* tokens prefilled, pinned: \['library'\]$"),
    "quickstart": (r"\(0 of \d+ prompt", r"\([1-9]\d* of \d+ prompt"),
    "clients": (r" \d+$",),
}


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def lines_of_shell() -> list[str]:
    blocks = (block for text in PAGES.values() for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.DOTALL))
    return sorted({line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()})


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page in NEED_SERVER else ()) for page in PAGES if python_of(page)],
)
def test_the_python_of_a_page_runs(
    page: str, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx_lm.server

    loaded = load_model("tiny")
    monkeypatch.setattr("mlx_lm.load", lambda name: (loaded.model, loaded.tokenizer))
    monkeypatch.setattr(mlx_lm.server, "LRUPromptCache", mlx_lm.server.LRUPromptCache)  # a page replaces it
    monkeypatch.chdir(tmp_path)
    code = "\n".join(python_of(page))
    with ExitStack() as running:
        if page in NEED_SERVER:
            code = code.replace("http://localhost:8080", running.enter_context(serving()).url)
        if page in NEED_REDIS:
            server: Server = request.getfixturevalue("redis")
            code = code.replace("redis://cache.internal:6379/0", server.url)
        exec(compile(code, f"{page}.md", "exec"), {"__name__": page, "model": loaded.model})
    printed = capsys.readouterr().out
    for pattern in PRINTED.get(page, ()):
        assert re.search(pattern, printed, re.MULTILINE | re.DOTALL), printed


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if SHOWN.search(text)])
def test_the_commands_of_a_page_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    talks = PAGES[page].partition("as `talks.jsonl`:\n\n")[2].partition("\n\n")[0]
    (tmp_path / "talks.jsonl").write_text(talks, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for line, printed in SHOWN.findall(PAGES[page]):
        code, out, _ = command(*line.split())
        assert code == 0, line
        assert out.split() == printed.split(), line  # long lines are broken


def test_every_command_and_option_of_the_pages_exists() -> None:
    top: Any = typer.main.get_command(app)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = set[str]()
    for line in lines_of_shell():
        shown.add(line.split()[0] if line else "")
        for extra in re.findall(r"radixcache\[([a-z,]+)\]", line):
            assert set(extra.split(",")) <= set(extras), line
        if line.startswith("make "):
            assert line.split()[1] in targets, line
        if (words := line.rpartition("uvx ")[2].split())[:1] != ["radixcache"] or len(words) < 2:
            continue
        found, rest = top, words[1:]
        while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
            assert rest[0] in found.commands, line
            found, rest = found.commands[rest[0]], rest[1:]
        rest = rest[: rest.index("--")] if "--" in rest else rest  # what follows is for another program
        options = {name for option in found.params for name in option.opts}
        assert {word for word in rest if word.startswith("--")} <= options, line
    assert {"radixcache", "pip", "make"} <= shown


def test_no_page_has_marks_of_a_conflict() -> None:
    marks = re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE)
    assert not [page for page, text in PAGES.items() if marks.search(text)]


def test_the_generated_pages_are_what_the_code_makes() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run python docs/generate.py"
