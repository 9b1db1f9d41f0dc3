"""render_view: the description of a tree in one of FORMATS."""

from __future__ import annotations

from collections.abc import Callable

from radixcache.view.description import TreeView
from radixcache.view.page import page
from radixcache.view.picture import picture
from radixcache.view.text import text

#: How a description can be shown, and how many nodes each shows unless told otherwise.
FORMATS: dict[str, int] = {"text": 200, "svg": 200, "html": 50_000, "json": 1 << 62}

_RENDERERS: dict[str, Callable[[TreeView, int], str]] = {
    "text": text,
    "svg": picture,
    "html": page,
    "json": lambda view, _: view.to_json(),
}


def render_view(view: TreeView, format: str = "text", max_nodes: int | None = None) -> str:
    """Show a description.

    Args:
        format: a key of FORMATS. A picture is SVG, a page HTML that needs nothing from elsewhere.
        max_nodes: nodes shown; those with the most tokens behind them are, the rest is counted where it hangs. JSON
            has all of them.

    Raises:
        ValueError: a format that is not known, or max_nodes below 1.
    """
    if format not in _RENDERERS:
        raise ValueError(f"format is {format!r}; wanted one of {', '.join(FORMATS)}.")
    if max_nodes is not None and (isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1):
        raise ValueError(f"max_nodes is {max_nodes!r}; wanted a whole number of nodes, 1 or more.")
    return _RENDERERS[format](view, FORMATS[format] if max_nodes is None else max_nodes)
