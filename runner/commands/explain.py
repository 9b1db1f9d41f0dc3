"""`radixcache explain`: which messages or template pieces of recorded conversations break the prefix."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from runner.commands import outputs
from runner.commands.inputs import SkipBad, load_outline, read_chosen, scheduled_requests
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from radixcache.layers.sizes import SizedLayout
    from runner.models.load import ModelOutline


def explain(
    context: Context,
    file: Annotated[list[Path], Argument(help="Conversations as for replay, or a folder like ~/.claude/projects.")],
    model: Annotated[str, Option(help="demo, tiny, tiny:KIND, a folder or hub id, without weights.")] = "demo",
    users: Annotated[int | None, Option(help="Use only the first N users.  [default: all]")] = None,
    seed: Annotated[int, Option(help="Seed of the schedule, as for replay.")] = 0,
    requests: Annotated[int | None, Option(help="Explain at most N requests.  [default: all]")] = None,
    budget_mib: Annotated[float | None, Option(help="Budget of the cache, in MiB.  [default: no limit]")] = None,
    policy: Annotated[str, Option(help="Eviction policy: a name, or my.module:Class.")] = "lru",
    top: Annotated[int, Option(help="Breaks to show, most lost tokens first.")] = 10,
    skip_bad: SkipBad = False,
    json_file: Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")] = None,
) -> None:
    """Show what breaks the prefix of conversations.

    Lists messages and template pieces by the tokens that they lose. A token is lost if an earlier request evaluated it
    and a later request has to evaluate it again. In sessions of coding agents, all that a request behind a compaction
    evaluates is lost, too. The requests are rendered and run through the cache as in replay, with sizes in place of
    layer state: no model runs, and no weights are loaded.
    """
    outputs.require_counts(users=users, requests=requests, top=top)
    budget_bytes = outputs.UNLIMITED_BYTES if budget_mib is None else outputs.bytes_of(budget_mib)
    outputs.require_policy(policy)
    results = outputs.Outputs({"--json": json_file}, [*file, Path(model)])
    conversations = read_chosen(file, skip_bad)
    if unanswered := sum(not each.replies_recorded for each in conversations):
        noun = "conversation has" if unanswered == 1 else "conversations have"
        outputs.say(f"note: {unanswered} {noun} no recorded replies; a short text is used for each reply.")
    outline, lines = load_outline(model), ProgressLines(has_bar=False)

    from runner.breaks import breaks_text, find_breaks, unwritten_parts, with_replies
    from runner.files import json_bytes
    from runner.script.conversation_reader import not_in_logs
    from runner.script.script import ScriptError

    if unwritten := unwritten_parts(outline.tokenizer, conversations):
        parts = " and ".join(unwritten)
        outputs.say(f"note: the chat template of {outline.name} leaves out {parts}; --model names another.")
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
        outputs.say(f"note: {skipped} of {plural(len(scheduled), 'request')} skipped: they do not fit {outline.name}.")
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
        "not_in_logs": not_in_logs(conversations),
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
        outputs.say(
            f"note: {outline.name}: {error} Explained as a model with full attention only, at 1 byte per token."
        )
        return SizedLayout(1)
    return SizedLayout(sizes.token_bytes, sizes.state_bytes, sizes.windows)
