"""The rooms of radixcache and the arrows between them, as the files' own imports have it.

    python -m tests.architecture             print the picture, and the lines of each room
    python -m tests.architecture --write     put the picture into docs/architecture.md

Every import counts: at the top of a file, inside of a function, and for type checking alone. Left out is
`radixcache/__init__.py`: what it names is imported when somebody asks for it.
"""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- picture: python -m tests.architecture --write -->", "<!-- end of picture -->"

#: What imports what.
Arrows = dict[str, set[str]]


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


def picture(rooms: Arrows) -> str:
    """A staircase from the highest floor down: each room's line reaches right to what it imports, which is below it."""
    floors = floors_of(rooms)
    order = sorted(rooms, key=lambda room: (-floors[room], room))
    margin = max(map(len, rooms)) + 2
    rows, falling = [], set[int]()
    for index, room in enumerate(order):
        columns = {order.index(other) for other in rooms[room]}
        last = max(columns, default=index)
        row = f"{room} ".rjust(margin + 3 * index) + "■"
        for column in range(index + 1, len(order)):
            line = "──" if column <= last else "  "
            passing = "│" if column in falling else ("─" if column <= last else " ")
            row += line + ("●" if column in columns else "┼" if passing == "│" and column <= last else passing)
        falling = (falling | columns) - {index}
        rows.append(f"{floors[room]} {row}".rstrip())
    return "\n".join(rows)


def written(page: str, drawn: str) -> str:
    """The page with this picture between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n```text\n{drawn}\n```\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    rooms = arrows_between_rooms(arrows_of("radixcache"))
    drawn = picture(rooms)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), drawn), encoding="utf-8")
        return
    print(drawn, end="\n\n")
    for room in sorted(rooms):
        folder = ROOT / "radixcache" / room
        files = sorted(folder.glob("*.py")) or [folder.with_suffix(".py")]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{room:12} {len(files):3} files {lines:6,} lines")


def _imported(path: Path) -> set[str]:
    """Names of all modules that a file may mean by its imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}:{node.lineno}: a relative import; wanted the module's whole name."
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    main()
