"""`radixcache explain`: which messages or template pieces of recorded conversations break the prefix."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from runner.commands import outputs
from runner.commands.inputs import ConversationOptions, JsonFile, load_outline, read_chosen, with_options
from runner.text import ProgressLines, plural

if TYPE_CHECKING:
    from radixcache.layers.sizes import SizedLayout
    from runner.models.load import ModelOutline


@with_options(ConversationOptions)
def explain(
    context: Context,
    options: ConversationOptions,
    file: Annotated[list[Path], Argument(help="Conversations as for replay, or a folder like ~/.claude/projects.")],
    top: Annotated[int, Option(help="Breaks to show, most lost tokens first.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Show what breaks the prefix of conversations.

    Lists messages and template pieces by the tokens that they lose. A token is lost if an earlier request evaluated it
    and a later request has to evaluate it again. In sessions of coding agents, all that a request behind a compaction
    evaluates is lost, too. The requests are rendered and run through the cache as in replay, with sizes in place of
    layer state: no model runs, and no weights are loaded.
    """
    outputs.require_counts(top=top)
    budget_bytes = options.budget_bytes()
    results = outputs.Outputs({"--json": json_file}, [*file, Path(options.model)])
    conversations = read_chosen(file, options.skip_bad)
    if unanswered := sum(not each.replies_recorded for each in conversations):
        noun = "conversation has" if unanswered == 1 else "conversations have"
        outputs.say(f"note: {unanswered} {noun} no recorded replies; a short text is used for each reply.")
    outline, lines = load_outline(options.model), ProgressLines(has_bar=False)

    from runner.breaks import breaks_text, find_breaks, unwritten_parts, with_replies
    from runner.files import json_bytes
    from runner.script.conversation_reader import not_in_logs
    from runner.script.script import ScriptError

    if unwritten := unwritten_parts(outline.tokenizer, conversations):
        parts = " and ".join(unwritten)
        outputs.say(f"note: the chat template of {outline.name} leaves out {parts}; --model names another.")
    scheduled = options.schedule(with_replies(conversations))
    with outputs.usage_errors(ScriptError):
        report, skipped = find_breaks(
            outline,
            _layout(outline),
            scheduled,
            budget_bytes=budget_bytes,
            policy=options.policy,
            skip_bad=options.skip_bad,
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
        "seed": options.seed,
        "budget_mib": options.budget_mib,
        "policy": options.policy,
        "skipped_requests": skipped,
        "not_in_logs": not_in_logs(conversations),
        **outputs.about(context),
    }
    results.write("--json", lambda: json_bytes(document))
    results.finish()


def _layout(outline: "ModelOutline") -> "SizedLayout":
    """The model's layers as sizes; full attention alone if its layers are not known."""
    from radixcache.layers.sizes import SizedLayout
    from runner.models import ModelConfigError
    from runner.models.sizes import model_bytes

    try:
        sizes = model_bytes(outline.config)
    except ModelConfigError as error:
        outputs.say(
            f"note: {outline.name}: {error} Explained as a model with full attention only, at 1 byte per token."
        )
        return SizedLayout(1)
    return SizedLayout(sizes.token_bytes, sizes.state_bytes, sizes.windows)
