"""Mutants: small slips put into the code on purpose, each with what a user would see of it.

A mutant names a function and an edit of its syntax tree. The file and the package play no role, nor do comments,
quotes and line breaks: code may move and be reformatted, and its mutants still fit. Where the code itself is rewritten,
rewrite the mutant too. Remove a mutant only when the line that it breaks is gone.

`caught.json` names a test that fails for each mutant: `python -m tests.mutants --record --only NAME` finds and
records it.

The mutants lie in the text files beside this one. A blank line ends a mutant:

    name: what a user would see go wrong.
    @ Class.method test_file.py test_other_file.py
    - the old code
    + the new code

The name after `@` is the qualified name of a function, a class or a module-level constant; a nested function is
`outer.inner`. The test files probably catch the mutant and run before all others. Old and new code are an expression or
one or more statements. An expression is replaced by an expression. No new code: the old statements go.
A body of `...` in the old code stands for any body; a `...` in the new code is that body again.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("policies", "radixcache", "runner")
#: The parts of a node that are runs of statements.
BODIES = ("body", "orelse", "finalbody")
Fragment = ast.expr | list[ast.stmt]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One slip: what it does in a few words, where, the code before and after, and the test files to run first."""

    name: str
    breaks: str
    function: str
    old: str
    new: str
    first: tuple[str, ...]

    def fragments(self) -> tuple[Fragment, Fragment]:
        """The old and the new code: both an expression, or both statements."""
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        match old, new:
            case [ast.Expr(value=before)], [ast.Expr(value=after)]:
                return before, after
        return old, new


@dataclass(frozen=True, slots=True)
class Place:
    """Where a mutant's old code stands: `owner.field`, or there from `start` to `end` in a list."""

    path: Path
    owner: ast.AST
    field: str
    start: int | None
    end: int
    bodies: list[list[ast.stmt]]  # What each body of `...` stands for.

    def __str__(self) -> str:
        value = getattr(self.owner, self.field)
        return f"{self.path}:{(value if self.start is None else value[self.start]).lineno}"


class Code:
    """The syntax trees of the packages below `root`, each file parsed once."""

    def __init__(self, root: Path) -> None:
        self._trees: dict[Path, ast.Module] = {}
        self._definitions: dict[str, list[tuple[Path, ast.AST]]] = defaultdict(list)
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                tree = self._trees[path.relative_to(root)] = ast.parse(path.read_text())
                for name, node in definitions(tree):
                    self._definitions[name].append((path.relative_to(root), node))

    def place(self, mutant: Mutant) -> Place:
        """The one place that has a mutant's old code. LookupError: no place has it, or several have."""
        old, _ = mutant.fragments()
        definitions = self._definitions[mutant.function]
        places = [place for path, node in definitions for place in _places(path, node, old)]
        if len(places) != 1:
            what = f"{len(places)} places in {len(definitions)} definitions of {mutant.function} have its old code"
            where = ", ".join(map(str, places)) or ", ".join(str(path) for path, _ in definitions) or "no file"
            raise LookupError(f"{mutant.name}: {what} ({where}); wanted one place.")
        return places[0]

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[tuple[Path, ast.Module]]:
        """The path of the file that a mutant changes, below the root, and the tree of that file with the mutant."""
        place = self.place(mutant)
        _, new = mutant.fragments()
        before = getattr(place.owner, place.field)
        after: object = _filled(new, iter(place.bodies))
        if place.start is not None:
            nodes = after if isinstance(after, list) else [after]
            after = [*before[: place.start], *nodes, *before[place.end :]] or [ast.Pass()]
        setattr(place.owner, place.field, after)
        try:
            yield place.path, self._trees[place.path]
        finally:
            setattr(place.owner, place.field, before)

    def texts(self) -> dict[Path, str]:
        """All files as they are written with a mutant, but without any: no comments, other line breaks."""
        return {path: ast.unparse(tree) for path, tree in self._trees.items()}


def read_mutants() -> tuple[Mutant, ...]:
    """All mutants of the text files."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.txt"))]
    return tuple(_parsed(block) for text in texts for block in text.strip().split("\n\n"))


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every function, class and module-level constant with its qualified name."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from ((target.id, statement) for target in targets if isinstance(target, ast.Name))
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + child.name, child
                waiting.append((f"{prefix}{child.name}.", child))
            elif not isinstance(child, ast.expr):
                waiting.append((prefix, child))


def _parsed(block: str) -> Mutant:
    lines = block.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("@ "))
    name, _, breaks = " ".join(lines[:at]).partition(": ")
    function, *first = lines[at].split()[1:]
    code = {sign: "\n".join(line[2:] for line in lines[at + 1 :] if line[:1] == sign) for sign in "-+"}
    return Mutant(name, breaks, function, code["-"], code["+"], tuple(first))


def _places(path: Path, definition: ast.AST, old: Fragment) -> Iterator[Place]:
    """Where in a definition the old code stands."""
    for owner in ast.walk(definition):
        for field, value in ast.iter_fields(owner):
            bodies: list[list[ast.stmt]] = []
            if not isinstance(value, list):
                if isinstance(old, ast.expr) and _is_same(old, value, bodies):
                    yield Place(path, owner, field, None, 0, bodies)
                continue
            wanted = old if isinstance(old, list) else [old]
            if isinstance(old, list) and field not in BODIES:
                continue
            for start in range(len(value) - len(wanted) + 1):
                bodies = []
                end = start + len(wanted)
                if all(_is_same(a, b, bodies) for a, b in zip(wanted, value[start:end], strict=True)):
                    yield Place(path, owner, field, start, end, bodies)


def _is_same(old: object, found: object, bodies: list[list[ast.stmt]]) -> bool:
    """Compare two trees; `bodies` takes what each body of `...` in the old one stands for."""
    if type(old) is not type(found):
        return False
    if isinstance(old, list) and isinstance(found, list):
        if _is_any_body(old):
            bodies.append(found)
            return True
        return len(old) == len(found) and all(_is_same(a, b, bodies) for a, b in zip(old, found, strict=True))
    if isinstance(old, ast.AST) and isinstance(found, ast.AST):
        return all(_is_same(value, getattr(found, field, None), bodies) for field, value in ast.iter_fields(old))
    return old == found


def _filled(new: Fragment, bodies: Iterator[list[ast.stmt]]) -> Fragment:
    """The new code with the bodies that its `...` stand for."""
    for node in [each for root in (new if isinstance(new, list) else [new]) for each in ast.walk(root)]:
        for field in BODIES:
            if _is_any_body(getattr(node, field, None)):
                setattr(node, field, next(bodies))
    return new


def _is_any_body(value: object) -> bool:
    match value:
        case [ast.Expr(value=ast.Constant(value=constant))]:
            return constant is ...
    return False
