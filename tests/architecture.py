"""The rooms of radixcache, the arrows between them, and the size of the project, as the files have it.

    python -m tests.architecture             print the figures, and the lines of each room
    python -m tests.architecture --write     put the figures into docs/architecture.md

Every import counts: at the top of a file, inside of a function, and for type checking alone. Left out is
`radixcache/__init__.py`: what it names is imported when somebody asks for it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from benchmarks.bench_hops import measure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- figures: python -m tests.architecture --write -->", "<!-- end of figures -->"
PRODUCT = ("policies", "radixcache", "runner")
#: Classes whose public members are counted.
FACES = ("PrefixCache", "Session", "Group", "Row")

#: What imports what.
Arrows = dict[str, set[str]]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes_of(path: Path) -> list[Definition | ast.Import | ast.ImportFrom]:
    """All classes, functions and imports of a file, which is read once."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def definitions(packages: Iterable[str] = PRODUCT) -> Iterator[Definition]:
    """All classes and functions of some packages."""
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        yield from (node for node in nodes_of(path) if not isinstance(node, ast.Import | ast.ImportFrom))


def arrows_of(package: str) -> Arrows:
    """Each file of a package, as a module's name, and the files of the package that it imports."""
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in found.items()}
    del files[package]
    return {name: _imported(path) & files.keys() - {name} for name, path in files.items()}


def room_of(module: str) -> str:
    """The room of a file; a file outside of all rooms is one by itself."""
    return module.split(".")[1]


def arrows_between_rooms(files: Arrows) -> Arrows:
    rooms: Arrows = {room_of(name): set() for name in files}
    for name, imported in files.items():
        rooms[room_of(name)] |= {room_of(other) for other in imported} - {room_of(name)}
    return rooms


def floors_of(rooms: Arrows) -> dict[str, int]:
    """The floor of each room, one above the highest that it imports. CycleError: arrows go in a circle."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[other] for other in rooms[room]), default=-1)
    return floors


def lines_of(package: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / package).rglob("*.py"))


def files_of(package: str) -> int:
    return sum(1 for _ in (ROOT / package).rglob("*.py"))


def longest() -> tuple[tuple[int, str], tuple[int, str]]:
    """The lines and the name of the longest class and of the longest function of the product."""
    classes, functions = [], []
    for node in definitions():
        found = classes if isinstance(node, ast.ClassDef) else functions
        found.append(((node.end_lineno or 0) - node.lineno + 1, node.name))
    return max(classes), max(functions)


def public_members() -> dict[str, int]:
    """The public methods and properties of each of FACES."""
    bodies = {node.name: node.body for node in definitions() if isinstance(node, ast.ClassDef) and node.name in FACES}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        name: sum(isinstance(each, kinds) and not each.name.startswith("_") for each in bodies[name]) for name in FACES
    }


def term_count(page: str) -> int:
    """The rows of the tables of words."""
    return len(re.findall(r"^\| (?!term )", page.partition("## Words")[2], re.M))


def figures(page: str) -> str:
    """The table of figures; the files and hops of calls are counted while they run."""
    calls = measure()
    (class_lines, class_name), (function_lines, function_name) = longest()
    members, names = public_members(), ", ".join(f"`{package}/`" for package in PRODUCT)

    def crossed(call: str) -> str:
        files, hops = calls[call]["files"], calls[call]["hops"]
        return str(files) if hops is None else f"{files} ({hops})"

    rows = [
        (f"lines of {names}, in hundreds", ", ".join(f"{round(lines_of(each), -2):,}" for each in PRODUCT)),
        (f"files of {names}", ", ".join(str(files_of(each)) for each in PRODUCT)),
        ("lines of the tests, in hundreds", f"{round(lines_of('tests'), -2):,}"),
        ("longest class, longest function", f"{class_name} {class_lines}, {function_name} {function_lines}"),
        *((f"files (hops) of {call}", crossed(call)) for call in calls),
        ("rows of words below", str(term_count(page))),
        ("public members of " + ", ".join(f"`{name}`" for name in FACES), ", ".join(map(str, members.values()))),
    ]
    return "\n".join(["| what | now |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in rows)])


def with_figures(page: str) -> str:
    """The page with the figures of the code."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{figures(page)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_figures(page), encoding="utf-8")
        return
    print(figures(page), end="\n\n")
    for room in sorted(arrows_between_rooms(arrows_of("radixcache"))):
        folder = ROOT / "radixcache" / room
        files = sorted(folder.glob("*.py")) or [folder.with_suffix(".py")]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{room:12} {len(files):3} files {lines:6,} lines")


def _imported(path: Path) -> set[str]:
    """Names of all modules that a file may mean by its imports."""
    found = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}:{node.lineno}: a relative import; wanted the module's whole name."
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    main()
