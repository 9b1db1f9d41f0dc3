"""`radixcache explain`: which messages or template pieces of recorded conversations break the prefix."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runner.commands import outputs
from runner.commands.inputs import load_outline, read_chosen, scheduled_requests
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from radixcache.layers.sizes import SizedLayout
    from runner.models.load import ModelOutline


def explain(
    context: typer.Context,
    file: Annotated[list[Path], typer.Argument(help="Files of conversations, as for replay; several are read as one.")],
    model: Annotated[str, typer.Option(help="demo, tiny, tiny:KIND, a folder, or a hub id; no weights.")] = "demo",
    users: Annotated[int | None, typer.Option(help="Take only the first so many users.  [default: all]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the schedule, as for replay.")] = 0,
    requests: Annotated[int | None, typer.Option(help="Requests to explain at most.  [default: all]")] = None,
    budget_mib: Annotated[float | None, typer.Option(help="Byte budget, in MiB.  [default: no limit]")] = None,
    policy: Annotated[str, typer.Option(help="What the cache evicts first.")] = "lru",
    top: Annotated[int, typer.Option(help="Breaks to show; the one with most lost tokens is first.")] = 10,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out, and count, bad records.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Say what breaks the prefix of conversations.

    Messages and template pieces, ranked by tokens lost. The requests are rendered and run through the cache as in
    replay, with sizes in place of layer state: the model computes nothing, and its weights are not loaded. A token is
    lost if an earlier request evaluated it and this one has to evaluate it again.
    """
    outputs.require_counts(users=users, requests=requests, top=top)
    budget_bytes = outputs.UNLIMITED_BYTES if budget_mib is None else outputs.bytes_of(budget_mib)
    outputs.require_policy(policy)
    results = outputs.Outputs({"--json": json_file}, [*file, Path(model)])
    conversations = read_chosen(file, skip_bad)
    if unanswered := sum(not each.replies_recorded for each in conversations):
        noun = "conversation has" if unanswered == 1 else "conversations have"
        outputs.say(f"note: {unanswered} {noun} no replies recorded; a short one stands in for each.")
    outline, lines = load_outline(model), ProgressLines()

    from runner.breaks import breaks_text, find_breaks, with_replies
    from runner.files import json_bytes
    from runner.script.script import ScriptError

    scheduled = scheduled_requests(with_replies(conversations), users=users, seed=seed, max_requests=requests)
    with outputs.usage_errors(ScriptError):
        report, skipped = find_breaks(
            outline,
            _layout(outline),
            scheduled,
            budget_bytes=budget_bytes,
            policy=policy,
            skip_bad=skip_bad,
            on_progress=lambda done: lines.tell(lambda: f"{done:,} of {len(scheduled):,} requests"),
        )
    if skipped:
        outputs.say(f"note: {skipped} of {plural(len(scheduled), 'request')} skipped: not fit for {outline.name}.")
    results.show(breaks_text(report, top=top))
    document = {
        **asdict(report),
        "new_tokens": report.new_tokens,
        "model": outline.name,
        "files": [str(path) for path in file],
        "seed": seed,
        "budget_mib": budget_mib,
        "policy": policy,
        "skipped_requests": skipped,
        **outputs.about(context),
    }
    results.write("--json", lambda: json_bytes(document))
    results.finish()


def _layout(outline: "ModelOutline") -> "SizedLayout":
    """The model's layers as sizes; full attention alone if its layers are not known."""
    from radixcache.layers.sizes import SizedLayout
    from runner.models.footprint import ModelConfigError
    from runner.models.sizes import model_bytes

    try:
        sizes = model_bytes(outline.config)
    except ModelConfigError as error:
        outputs.say(f"note: {outline.name}: {error} Explained as a model with full attention alone, 1 byte per token.")
        return SizedLayout(1)
    return SizedLayout(sizes.token_bytes, sizes.state_bytes, sizes.windows)
