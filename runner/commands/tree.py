"""`radixcache tree`: the tree that conversations make under a budget, or a saved one, as text, picture or page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from runner.commands import outputs
from runner.commands.inputs import (
    ConversationOptions,
    SizeOptions,
    given_files,
    load_outline,
    read_chosen,
    with_options,
)
from runner.commands.outputs import require
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from radixcache import TreeView

#: How a saved tree begins.
SAVED = re.compile(rb'\s*\{\s*"format":\s*"radixcache-tree"')


@dataclass(frozen=True, kw_only=True)
class TreeOptions(SizeOptions, ConversationOptions):
    """What the tree is made from."""


@with_options(TreeOptions)
def tree(
    context: typer.Context,
    options: TreeOptions,
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
) -> None:
    """Show the prefix tree of conversations.

    No model runs. The requests are interleaved, rendered and served as in `replay --recorded`, by the same cache, with
    sizes in place of layer state.
    """
    require(
        format_name in outputs.VIEW_ENDINGS.values(),
        f"--format is {format_name!r}; wanted {', '.join(outputs.VIEW_ENDINGS.values())}.",
    )
    outputs.require_counts(max_nodes=max_nodes)
    budget_bytes = options.budget_bytes()
    if out is not None and out != outputs.STDOUT:
        ending = outputs.require_view_file(out)
        require(
            not outputs.is_given(context, "format_name") or format_name == ending,
            f"--format {format_name} does not match --out {out}. Leave --format out.",
        )
        format_name = ending
    results = outputs.Outputs({"--out": out}, [*(inputs or []), options.model_config, Path(options.model)])
    view, note = _saved_tree(inputs or []), ""
    if view is None:
        sizes = options.load()
        conversations = read_chosen(inputs, options.skip_bad)
        outline, lines = load_outline(options.model), ProgressLines(has_bar=False)

        from runner.models import ModelConfigError
        from runner.models.sizes import model_bytes
        from runner.script.script import ScriptError
        from runner.simulate.simulator import grow_tree

        if sizes is None:
            try:
                sizes = model_bytes(outline.config, kv_bits=options.kv_bits, kv_group_size=options.kv_group_size)
            except ModelConfigError as error:
                raise outputs.UsageError(
                    f"{options.model}: {error} Give --model-config or --bytes-per-token."
                ) from error
        scheduled = options.schedule(conversations)
        with outputs.usage_errors(ScriptError, ValueError):
            cache, skipped = grow_tree(
                scheduled,
                outline.tokenizer,
                sizes,
                budget_bytes=budget_bytes,
                policy=options.policy,
                skip_bad=options.skip_bad,
                on_progress=lambda done: lines.tell(lambda: f"{done:,} of {len(scheduled):,} requests"),
            )
        if skipped:
            outputs.say(f"note: {plural(len(skipped), 'request')} skipped, the first: {skipped[0]}")
        view, note = cache.view(tokenizer=outline.tokenizer), f"{plural(cache.stats.requests, 'request')} read; "
        if options.budget_mib is None:
            note += "without --budget-mib nothing was evicted."
        else:
            evicted = f"{plural(cache.stats.evictions, 'eviction')} by {options.policy}"
            note += f"{evicted} under a budget of {options.budget_mib:g} MiB."
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
