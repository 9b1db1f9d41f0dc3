"""`radixcache store`: what lies in the folder of a store on disk, whether it is sound, and removal of some of it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runner.commands.outputs import EXIT_CHECK_FAILED, Outputs, UsageError, say
from runner.text import MIB, plural

if TYPE_CHECKING:
    from radixcache.stores.files import StoredFile

store = typer.Typer(name="store", help="List, check and tidy prefixes that are kept on disk.")

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The folder that was given as --disk.")]
DAY_S = 24 * 60 * 60


@store.command("ls")
def list_all(path: Folder) -> None:
    """List what is there, by model and namespace. One model has several lines where weights or settings differ."""
    from runner.text import table_of_figures

    groups: dict[tuple[str, str, str], list[StoredFile]] = defaultdict(list)
    for file in _scanned(path):
        identity = file.head.identity
        groups[identity.model, identity.digest.hex()[:8], file.head.namespace].append(file)
    table = table_of_figures("model", "identity", "namespace", "tokens", "files", "MiB", "last used (UTC)")
    for names, files in sorted(groups.items()):
        tokens = sum(len(file.head.tokens) for file in files if file.head.kind == "block")
        nbytes, used_s = sum(file.nbytes for file in files), max(file.used_s for file in files)
        used = time.strftime("%Y-%m-%d %H:%M", time.gmtime(used_s))
        table.add_row(*names, f"{tokens:,}", f"{len(files):,}", f"{nbytes / MIB:,.1f}", used)
    outputs = Outputs({})
    outputs.show(table)
    outputs.finish()


@store.command()
def verify(
    path: Folder,
    secret_file: Annotated[Path | None, typer.Option(help="File with the secret that it was made with.")] = None,
) -> None:
    """Read every file and check it. Exit 1: some are damaged; they are named, and prefixes behind them not found."""
    from rich.console import Console
    from rich.progress import track

    from radixcache.stores import files

    damaged = count = 0
    with _usable():
        secret = None if secret_file is None else secret_file.read_bytes()
        total = sum(1 for _ in files.scan(path))
        checked = files.verify(path, secret)
        console = Console(stderr=True)
        for name, _, wrong in track(checked, "checking", total, console=console, transient=True):
            count += 1
            if wrong:
                damaged += 1
                say(f"check failed: {name}: {wrong}.")
    print(f"{plural(count, 'file')} checked, {damaged:,} damaged.")
    if damaged:
        raise typer.Exit(EXIT_CHECK_FAILED)


@store.command()
def gc(
    path: Folder,
    model: Annotated[str | None, typer.Option(help="Remove what is of this model, as `ls` names it.")] = None,
    unused_days: Annotated[float | None, typer.Option(help="Remove what was not used for so many days.", min=0)] = None,
) -> None:
    """Remove what nothing leads to any more, and what the options say, with all that follows it."""
    from radixcache.stores.files import remove

    files = sorted(_scanned(path), key=lambda file: (file.head.start, file.head.kind))
    oldest_s = None if unused_days is None else time.time() - unused_days * DAY_S
    gone = _unwanted(files, model, oldest_s)
    with _usable():
        removed = remove(path, [file.name for file in gone])
    print(f"{plural(removed, 'file')} removed, {sum(file.nbytes for file in gone) / MIB:,.1f} MiB.")


def _unwanted(files: "list[StoredFile]", model: str | None, oldest_s: float | None) -> "list[StoredFile]":
    """Those that are asked for, and those that only they lead to; files come in the order of their offsets."""
    from radixcache.stores.block import root_key

    reached: set[bytes] = set()
    gone = []
    for file in files:
        head = file.head
        before = head.parent if head.kind == "block" else head.key
        leads = before in reached or before == root_key(head.identity, head.namespace)
        is_old = oldest_s is not None and file.used_s < oldest_s and head.kind == "block"
        if not leads or is_old or head.identity.model == model:
            gone.append(file)
        elif head.kind == "block":
            reached.add(head.key)
    return gone


def _scanned(path: Path) -> "list[StoredFile]":
    from radixcache.stores.files import scan

    with _usable():
        return list(scan(path))


@contextmanager
def _usable() -> Iterator[None]:
    """Say in one line what is wrong with a folder."""
    from radixcache.errors import StoreError

    try:
        yield
    except (StoreError, OSError) as error:
        raise UsageError(str(error)) from error
