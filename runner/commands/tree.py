"""`radixcache tree`: the tree that conversations make under a budget, or a saved one, as text, picture or page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from runner.commands import outputs
from runner.commands.inputs import (
    SizeOptions,
    SkipBad,
    given_files,
    load_outline,
    read_chosen,
    scheduled_requests,
    with_options,
)
from runner.commands.outputs import require
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from radixcache import TreeView

#: How a saved tree begins.
SAVED = re.compile(rb'\s*\{\s*"format":\s*"radixcache-tree"')


@with_options(SizeOptions)
def tree(
    context: typer.Context,
    options: SizeOptions,
    inputs: Annotated[
        list[Path] | None,
        Argument(
            metavar="[CONVERSATIONS...]",
            help="Conversations as for replay (default: a built-in set), or a tree saved as .json.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, Option("--out", help="Write the tree to a .html, .svg, .txt or .json file.")] = None,
    format_name: Annotated[
        str, Option("--format", help=f"Format to print: {', '.join(outputs.VIEW_ENDINGS.values())}.")
    ] = "text",
    max_nodes: Annotated[int | None, Option(help="Most nodes to show.  [default: 200; 50,000 in .html]")] = None,
    model: Annotated[str, Option(help="Tokenizer and sizes: demo, tiny, tiny:KIND, a folder or hub id.")] = "demo",
    budget_mib: Annotated[float | None, Option(help="Budget of the cache, in MiB.  [default: no limit]")] = None,
    policy: Annotated[str, Option(help="Eviction policy: a name, or my.module:Class.")] = "lru",
    users: Annotated[int | None, Option(help="Use only the first N users.  [default: all]")] = None,
    seed: Annotated[int, Option(help="Seed of the schedule; equal seeds give equal requests.")] = 0,
    requests: Annotated[int | None, Option(help="Serve at most N requests.  [default: all]")] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Show the prefix tree of conversations.

    No model runs. The requests are interleaved, rendered and served as in `replay --recorded`, by the same cache, with
    sizes in place of layer state.
    """
    require(
        format_name in outputs.VIEW_ENDINGS.values(),
        f"--format is {format_name!r}; wanted {', '.join(outputs.VIEW_ENDINGS.values())}.",
    )
    outputs.require_counts(max_nodes=max_nodes, requests=requests, users=users)
    budget_bytes = outputs.UNLIMITED_BYTES if budget_mib is None else outputs.bytes_of(budget_mib)
    if out is not None and out != outputs.STDOUT:
        ending = outputs.require_view_file(out)
        require(
            not outputs.is_given(context, "format_name") or format_name == ending,
            f"--format {format_name} does not match --out {out}. Leave --format out.",
        )
        format_name = ending
    results = outputs.Outputs({"--out": out}, [*(inputs or []), options.model_config, Path(model)])
    view, note = _saved_tree(inputs or []), ""
    if view is None:
        sizes = options.load()
        outputs.require_policy(policy)
        conversations = read_chosen(inputs, skip_bad)
        outline, lines = load_outline(model), ProgressLines(has_bar=False)

        from runner.models.footprint import ModelConfigError
        from runner.models.sizes import model_bytes
        from runner.script.script import ScriptError
        from runner.simulate.simulator import grow_tree

        if sizes is None:
            try:
                sizes = model_bytes(outline.config, kv_bits=options.kv_bits, kv_group_size=options.kv_group_size)
            except ModelConfigError as error:
                raise outputs.UsageError(f"{model}: {error} Give --model-config or --bytes-per-token.") from error
        scheduled = scheduled_requests(conversations, users=users, seed=seed, max_requests=requests)
        with outputs.usage_errors(ScriptError, ValueError):
            cache, skipped = grow_tree(
                scheduled,
                outline.tokenizer,
                sizes,
                budget_bytes=budget_bytes,
                policy=policy,
                skip_bad=skip_bad,
                on_progress=lambda done: lines.tell(lambda: f"{done:,} of {len(scheduled):,} requests"),
            )
        if skipped:
            outputs.say(f"note: {plural(len(skipped), 'request')} skipped, the first: {skipped[0]}")
        view, note = cache.view(tokenizer=outline.tokenizer), f"{plural(cache.stats.requests, 'request')} read; "
        if budget_mib is None:
            note += "without --budget-mib nothing was evicted."
        else:
            note += f"{plural(cache.stats.evictions, 'eviction')} by {policy} under a budget of {budget_mib:g} MiB."
    if out is None or out == outputs.STDOUT:
        results.print_tree(view, format_name, max_nodes)
    else:
        if results.write("--out", lambda: outputs.view_bytes(view, format_name, max_nodes)):
            note = f"{note} Written to {out}.".strip()
    if note:
        outputs.say(note)
    results.finish()


def _saved_tree(paths: Sequence[Path]) -> "TreeView | None":
    """The tree that was saved in the only file given; None: it is something else."""
    if len(paths) != 1:
        return None
    from radixcache.observe.tree_view import ViewError, read_view

    try:
        content = given_files(paths)[0].read_bytes()
    except OSError:
        return None  # the reader of conversations says why
    if not SAVED.match(content):
        return None
    with outputs.usage_errors(ViewError, prefix=f"{paths[0]}: "):
        return read_view(content)
