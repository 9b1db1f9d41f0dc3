"""Files that a tree is shown in: their ending says as what."""

from pathlib import Path
from typing import TYPE_CHECKING

from runner.commands.usage import UsageError, require

if TYPE_CHECKING:
    from radixcache import TreeView

#: Formats of `PrefixCache.render` by the ending of the file.
ENDINGS = {".txt": "text", ".svg": "svg", ".html": "html", ".json": "json"}


def require_view_file(path: Path) -> str:
    """The format that a file's ending asks for."""
    wanted = ", ".join(ENDINGS)
    require(path.suffix.lower() in ENDINGS, f"{path}: ends in {path.suffix or 'nothing'!r}; wanted one of {wanted}.")
    return ENDINGS[path.suffix.lower()]


def write_view(path: Path, view: "TreeView", max_nodes: int | None = None) -> None:
    """Write a tree in the format that the file's ending asks for."""
    from radixcache.view.formats import render_view
    from runner.files.atomic import write_atomically

    try:
        write_atomically(path, (render_view(view, require_view_file(path), max_nodes).rstrip("\n") + "\n").encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from error
