"""`radixcache store`: list, check and tidy the folder of a store on disk."""

import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from radixcache.errors import StoreError
from runner.commands.outputs import EXIT_CHECK_FAILED, Outputs, say, usage_errors
from runner.text import MIB, figures_table, plural

if TYPE_CHECKING:
    from radixcache.stores.files import StoredFile

store = typer.Typer(name="store", help="List, check and clean up prefixes on disk.")

Folder = Annotated[Path, Argument(metavar="PATH", help="The folder that was given as --disk.")]
DAY_S = 24 * 60 * 60


@store.command("ls")
def list_all(path: Folder) -> None:
    """List the files by model and namespace. A model has several lines if its weights or settings differ."""
    groups: dict[tuple[str, ...], list[StoredFile]] = defaultdict(list)
    for file in _scan(path):
        identity = file.head.identity
        groups[identity.model, identity.maker, identity.digest.hex()[:8], file.head.namespace].append(file)
    names = ("model", "made with", "identity", "namespace")
    rows: list[tuple[str, ...]] = [(*names, "tokens", "files", "MiB", "last used (UTC)")]
    for group, files in sorted(groups.items()):
        tokens = sum(len(file.head.tokens) for file in files if file.head.kind == "block")
        nbytes, used_s = sum(file.nbytes for file in files), max(file.used_s for file in files)
        used = time.strftime("%Y-%m-%d %H:%M", time.gmtime(used_s))
        rows.append((*group, f"{tokens:,}", f"{len(files):,}", f"{nbytes / MIB:,.1f}", used))
    outputs = Outputs({})
    outputs.show(figures_table(zip(*rows, strict=True), names=names))
    outputs.finish()


@store.command()
def verify(
    path: Folder,
    secret_file: Annotated[Path | None, Option(help="File with the secret that the store was made with.")] = None,
) -> None:
    """Read and check every file. If files are damaged, name them and exit with 1.

    The cache does not find prefixes that continue from a damaged file.
    """
    from rich.console import Console
    from rich.progress import track

    from radixcache.stores import files

    damaged = count = 0
    with usage_errors(StoreError, OSError):
        secret = None if secret_file is None else secret_file.read_bytes()
        total = sum(1 for _ in files.scan(path))
        checked = files.verify(path, secret)
        for name, wrong in track(checked, "checking", total, console=Console(stderr=True), transient=True):
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
    model: Annotated[str | None, Option(help="Remove the files of this model, as `ls` names it.")] = None,
    unused_days: Annotated[float | None, Option(help="Remove files that were not used for N days.", min=0)] = None,
) -> None:
    """Remove files that no prefix reaches, files that the options select, and all files that continue from them."""
    from radixcache.stores.files import remove

    files = sorted(_scan(path), key=lambda file: (file.head.start, file.head.kind))
    oldest_s = None if unused_days is None else time.time() - unused_days * DAY_S
    unwanted = _select_unwanted(files, model, oldest_s)
    with usage_errors(StoreError, OSError):
        removed = remove(path, [file.head.place for file in unwanted])
    print(f"{plural(removed, 'file')} removed, {sum(file.nbytes for file in unwanted) / MIB:,.1f} MiB.")


def _select_unwanted(files: "list[StoredFile]", model: str | None, oldest_s: float | None) -> "list[StoredFile]":
    """Files to remove, and those that only they lead to. `files` are in the order of their offsets."""
    from radixcache.stores.block import root_key

    reached: set[bytes] = set()
    unwanted = []
    for file in files:
        head = file.head
        before = head.parent if head.kind == "block" else head.key
        leads = before in reached or before == root_key(head.identity, head.namespace)
        is_old = oldest_s is not None and file.used_s < oldest_s and head.kind == "block"
        if not leads or is_old or head.identity.model == model:
            unwanted.append(file)
        elif head.kind == "block":
            reached.add(head.key)
    return unwanted


def _scan(path: Path) -> "list[StoredFile]":
    from radixcache.stores.files import scan

    with usage_errors(StoreError, OSError):
        return list(scan(path))
