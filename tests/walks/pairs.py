"""A table of option values in which any two values that fit together meet in at least one row: a covering array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

#: The name of an option, and one of its values.
Value = tuple[str, Any]
Options = Mapping[str, Sequence[Any]]
Fits = Callable[[Value, Value], bool]


def all_pairs(options: Options, fits: Fits) -> Iterator[tuple[Value, Value]]:
    """Pairs of values of two options, without those that do not fit together."""
    for left, right in combinations(options, 2):
        pairs = (((left, one), (right, other)) for one in options[left] for other in options[right])
        yield from (pair for pair in pairs if fits(*pair))


def pair_table(options: Options, fits: Fits) -> list[dict[str, Any]]:
    """Rows with a value for each option. The same arguments give the same rows.

    Each row begins with a pair that no earlier row has. Then each option takes the value that adds the most such pairs;
    of equal values, the least used one.
    """
    left = dict.fromkeys(all_pairs(options, fits))
    used: Counter[Value] = Counter()
    table = []
    while left:
        row = dict(next(iter(left)))
        for name in options:
            if name not in row:
                values = [(name, value) for value in options[name]]
                values = [value for value in values if all(fits(value, each) for each in row.items())]
                assert values, f"no value of {name} fits {row}"
                new = {
                    value: sum(pair in left for pair in _pairs(row | {value[0]: value[1]}, options)) for value in values
                }
                name, value = max(values, key=lambda value: (new[value], -used[value]))
                row[name] = value
        for pair in _pairs(row, options):
            left.pop(pair, None)
        used.update(row.items())
        table.append({name: row[name] for name in options})
    return table


def _pairs(row: Mapping[str, Any], options: Options) -> Iterator[tuple[Value, Value]]:
    return combinations([(name, row[name]) for name in options if name in row], 2)
