"""docs/architecture.md shows the rooms as the imports have them, and what the pages for readers name is there."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.architecture import (
    PAGE,
    ROOT,
    arrows_between_rooms,
    arrows_of,
    definitions,
    floors_of,
    lines_of,
    longest,
    term_count,
    with_figures,
)

PACKAGES = ("policies", "radixcache", "runner", "benchmarks")
#: A path in a page is told from one of these folders.
FOLDERS = (ROOT, ROOT / "radixcache")
#: Every room may import these.
FREE = {"errors", "settings", "tokens"}
ANY = "any room"
#: The most files that each package may have.
MOST_FILES = {"radixcache": 80, "runner": 91}
#: The most lines of each package. What needs more says in its commit what the lines are for.
MOST_LINES = {"policies": 2_370, "radixcache": 23_490, "runner": 22_740, "tests": 49_770}
#: The most lines of a class and of a function, and the most terms of the page.
MOST_CLASS_LINES, MOST_FUNCTION_LINES, MOST_TERMS = 450, 100, 90
#: The most files that a call may cross.
MOST_CROSSED = {"begin": 14, "close": 14, "begin_many of two rows": 20, "chat request": 11}


def _table(page: str) -> dict[str, set[str] | None]:
    """What each room imports besides FREE, as the page's table of rooms has it; None: any room."""
    table: dict[str, set[str] | None] = {}
    for names, _, imports in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) ?\|$", page.partition("## How")[0], re.M):
        found = None if imports == ANY else set(re.findall(r"`(\w+)`", imports))
        table |= dict.fromkeys(re.findall(r"`(\w+)(?:/|\.py)`", names), found)
    return table


@pytest.mark.skipif(sys.platform != "linux", reason="another system may take other calls")
def test_the_figures_on_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_figures(page) == page, "python -m tests.architecture --write"


@pytest.mark.parametrize("package", MOST_LINES)
def test_a_package_stays_within_its_budget_of_lines(package: str) -> None:
    assert lines_of(package) <= MOST_LINES[package]


def test_classes_and_functions_stay_short_and_the_words_few() -> None:
    (class_lines, class_name), (function_lines, function_name) = longest()
    assert class_lines <= MOST_CLASS_LINES, class_name
    assert function_lines <= MOST_FUNCTION_LINES, function_name
    assert term_count(PAGE.read_text(encoding="utf-8")) <= MOST_TERMS


def test_a_request_crosses_few_files() -> None:
    page = PAGE.read_text(encoding="utf-8")  # whose figures are those of the code
    crossed = {name: int(files) for name, files in re.findall(r"^\| files \(hops\) of (.*?) \| (\d+) ", page, re.M)}
    assert {name: crossed[name] for name, most in MOST_CROSSED.items() if crossed[name] > most} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_itself_by_way_of_others(package: str) -> None:
    arrows = arrows_of(package)
    floors_of(arrows)  # CycleError names them


def test_the_table_has_every_room_with_what_it_imports_and_the_lower_floors_come_later() -> None:
    rooms = arrows_between_rooms(arrows_of("radixcache"))
    table = _table(PAGE.read_text(encoding="utf-8"))
    assert table.keys() == rooms.keys()
    assert {room: rooms[room] - FREE for room in rooms if table[room] is not None} == {
        room: imported for room, imported in table.items() if imported is not None
    }


def test_no_page_has_both_sides_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    marks = re.compile(r"^(<{7} |={7}$|>{7} )", re.M)
    assert [page.name for page in pages if marks.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/.-])[\w-]+(?:/[\w-]+)*(?:/[\w-]+\.(?:py|md|json|png)\b|/(?=[`\s)]))", text))
    assert len(paths) > 5
    missing = {path for path in paths if "NAME" not in path and not any((at / path).exists() for at in FOLDERS)}
    assert missing == set()


def test_every_name_of_the_code_that_the_page_gives_is_in_the_code() -> None:
    names = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(names) > 30
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    methods = {(node.name, each.name) for node in _classes() for each in node.body if isinstance(each, kinds)}
    assert names - methods == set()


def test_each_concept_has_its_home_in_the_code_and_no_home_twice() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## One home")[2].partition("\n## ")[0]
    homes = re.findall(r"`([\w.]+)`", re.sub(r"`[\w/]+\.py`", "", table))
    defined = {node.name for node in definitions(MOST_FILES)}
    assert len(homes) > 15
    assert len(set(homes)) == len(homes)
    assert {name for home in homes for name in home.split(".")} - defined == set()


@pytest.mark.parametrize("package", MOST_FILES)
def test_a_package_has_few_files_and_none_of_one_name(package: str) -> None:
    names = [path.name for path in (ROOT / package).rglob("*.py")]
    assert len(names) <= MOST_FILES[package]
    assert [name for name, count in Counter(names).items() if count > 1 and name != "__init__.py"] == []


def test_no_two_public_classes_have_one_name_and_the_table_of_words_names_classes_that_exist() -> None:
    classes = Counter(_public_classes())
    assert [name for name, count in classes.items() if count > 1] == []
    words = PAGE.read_text(encoding="utf-8").partition("## Words")[2]
    named = re.findall(r"`([A-Z]\w+)`", words)
    assert len(named) > 60
    assert [name for name, count in Counter(named).items() if count > 1 or name not in classes] == []


def _classes() -> Iterator[ast.ClassDef]:
    return (node for node in definitions(MOST_FILES) if isinstance(node, ast.ClassDef))


def _public_classes() -> list[str]:
    return [node.name for node in _classes() if not node.name.startswith("_")]
