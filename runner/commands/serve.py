"""`radixcache serve`: a server that speaks OpenAI's and Anthropic's APIs."""

import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

import runner
from radixcache.errors import RadixCacheError
from radixcache.settings import STORED_BITS
from runner.commands.inputs import with_options
from runner.commands.outputs import UsageError, require, require_policy, say, usage_errors
from runner.models import KV_BITS, KV_GROUP_SIZES
from runner.serve.options import ServeOptions, require_compatible

if TYPE_CHECKING:
    from starlette.types import ASGIApp

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@with_options(ServeOptions, come_first=True)
def serve(
    options: ServeOptions,
    *,
    allowed_origins: Annotated[str, Option(help="Web origins that may read replies, separated by commas.")] = "*",
    allowed_hosts: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="A name that Host may have over loopback, as behind Docker, a proxy or a tunnel: a name, *.NAME, or * "
            "for any; may be given several times. A valid key needs none.",
        ),
    ] = None,
    chat_template_args: Annotated[str, Option(help="JSON object of arguments for the chat template.")] = "{}",
    served_model_name: Annotated[
        list[str] | None, Option(help="A name for the served model; the option may be given several times.")
    ] = None,
    log_level: Annotated[str, Option(help=f"One of {', '.join(LOG_LEVELS)}.")] = "INFO",
    budget_gib: Annotated[float | None, Option(help="Budget of all caches together, in GiB.", min=0)] = None,
    prompt_cache_bytes: Annotated[
        str | None, Option(help="The same budget, as bytes, 500MB or 8GB.  [default: a quarter of the free memory]")
    ] = None,
    max_request_bytes: Annotated[
        str | None,
        Option(help="Most bytes that one request may hold while it runs, also beyond the budget.  [default: all free]"),
    ] = None,
    prompt_cache_size: Annotated[int | None, Option(help="Accepted, without effect.", hidden=True)] = None,
    prompt_concurrency: Annotated[int | None, Option(help="Accepted, without effect.", hidden=True)] = None,
    namespace_by: Annotated[str, Option(help="key: API keys share no prefixes; none: all share.")] = "none",
    pipeline: Annotated[bool, Option("--pipeline", help="Refused.", hidden=True)] = False,
) -> None:
    """Serve models to clients of OpenAI's, Anthropic's and Ollama's APIs.

    Takes the options of mlx_lm.server. Requests are decoded together, and each prompt starts from the longest prefix
    that the cache has. Ctrl-C ends the server when the running requests have finished.
    """
    for name, value in (("budget_gib", budget_gib), *vars(options).items()):
        option = "--" + name.replace("_", "-")
        require(not isinstance(value, float) or math.isfinite(value), f"{option} is {value}; wanted a finite number.")
    require(log_level.upper() in LOG_LEVELS, f"--log-level is {log_level!r}; wanted one of {', '.join(LOG_LEVELS)}.")
    require(namespace_by in ("key", "none"), f"--namespace-by is {namespace_by!r}; wanted key or none.")
    require(not pipeline, "--pipeline splits a model over machines; radixcache serve uses one machine. Leave it out.")
    require(
        budget_gib is None or prompt_cache_bytes is None,
        "--budget-gib and --prompt-cache-bytes are the same budget. Leave one out.",
    )
    require_policy(options.policy)
    with usage_errors(ValueError, prefix="--chat-template-args is not JSON: "):
        template_args = json.loads(chat_template_args)
    require(isinstance(template_args, dict), f"--chat-template-args is {chat_template_args}; wanted a JSON object.")
    if prompt_cache_size is not None:
        say("note: --prompt-cache-size has no effect; --prompt-cache-bytes limits the cache.")
    if prompt_concurrency is not None:
        say("note: --prompt-concurrency has no effect; prompts are prefilled in turns, a chunk of each.")
    options = replace(
        options,
        allowed_hosts=tuple(name.strip() for each in allowed_hosts or () for name in each.split(",")),
        allowed_origins=tuple(allowed_origins.split(",")),
        chat_template_args=template_args,
        served_model_names=tuple(served_model_name or ()),
        log_level=log_level.upper(),
        budget_bytes=_budget_bytes(budget_gib, prompt_cache_bytes),
        max_request_bytes=_bytes_of("--max-request-bytes", max_request_bytes),
        namespace_by="key" if namespace_by == "key" else "none",
    )
    _require_compatible(options)
    logging.basicConfig(level=options.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if runner.BLAS_ADVICE:
        say(f"note: {runner.BLAS_ADVICE}")
    _run(options)


def _budget_bytes(budget_gib: float | None, prompt_cache_bytes: str | None) -> int | None:
    given_bytes = None if budget_gib is None else int(budget_gib * (1 << 30))
    budget_bytes = given_bytes if prompt_cache_bytes is None else _bytes_of("--prompt-cache-bytes", prompt_cache_bytes)
    require(budget_bytes is None or budget_bytes > 0, "the budget is 0 bytes; wanted more than 0.")
    return budget_bytes


def _bytes_of(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    from runner.serve.mlx_lm_border import parse_size

    try:
        nbytes: int = parse_size(text)
    except (KeyError, ArithmeticError) as error:
        wanted = "wanted a number of bytes, or a size such as 500MB or 8GB."
        raise UsageError(f"{option} is {text!r}; {wanted}") from error
    require(nbytes > 0 or option == "--prompt-cache-bytes", f"{option} is 0 bytes; wanted more than 0.")
    return nbytes


def _require_compatible(options: ServeOptions) -> None:
    """Refuse options that contradict each other before anything is loaded."""
    listed: tuple[tuple[str, int | None, tuple[int | None, ...]], ...] = (
        ("--kv-bits", options.kv_bits, KV_BITS),
        ("--kv-group-size", options.kv_group_size, KV_GROUP_SIZES),
        ("--stored-bits", options.stored_bits, STORED_BITS[:-1]),
    )
    for option, number, known in listed:
        is_known = number is None or number in known
        require(is_known, f"{option} is {number}; wanted one of {', '.join(map(str, known))}.")
    named = (("--served-model-name", options.served_model_names or None), ("--only-model", options.only_model or None))
    for option, value in (("--adapter-path", options.adapter_path), ("--draft-model", options.draft_model), *named):
        require(value is None or options.model is not None, f"{option} needs --model.")
    require(
        options.namespace_by == "none" or options.api_keys is not None,
        "--namespace-by key needs --api-keys.",
    )


def _run(options: ServeOptions) -> None:
    import anyio

    from runner.serve.http_server import HttpServer, listen, url_of
    from runner.serve.mlx_lm_border import missing

    require(not missing, f"this mlx-lm lacks {', '.join(missing)}; install mlx-lm 0.32.2 or later.")
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        raise UsageError(f"--host {options.host} --port {options.port}: {error.strerror}.") from error
    anyio.run(anyio.sleep, 0)  # imports the back end that the first request would wait for
    with listening, ExitStack() as stack:
        with usage_errors(ValueError, OSError, RadixCacheError):
            app, stop = (_one_process if options.replicas is None else _replicas)(options, stack)
        print(_welcome(options, url_of(listening)), flush=True)
        HttpServer(app, partial(stop, options.drain_s)).run(sockets=[listening])


def _one_process(options: ServeOptions, stack: ExitStack) -> "tuple[ASGIApp, Callable[[float], object]]":
    """The application, with a generation thread in this process, and the function that stops it."""
    from runner.serve.app import make_app
    from runner.serve.metrics import Watch
    from runner.serve.scheduler import Scheduler

    watch = Watch()
    running = Scheduler(options, watch.on_record, watch.on_event)
    app = make_app(options, running, watch)
    stack.callback(running.stop, 0)
    running.start()
    return app, running.stop


def _replicas(options: ServeOptions, stack: ExitStack) -> "tuple[ASGIApp, Callable[[float], object]]":
    require_compatible(options)
    try:
        from runner.serve.replicas.fleet import Fleet, make_replicas_app
    except ImportError as error:
        raise UsageError(f"--replicas needs Ray Serve: pip install 'radixcache[ray]' ({error}).") from error
    fleet = Fleet(options)
    app = make_replicas_app(options, fleet)
    stack.callback(fleet.stop, 0)
    fleet.start(os.cpu_count() or 1)
    return app, fleet.stop


def _welcome(options: ServeOptions, url: str) -> str:
    body = {"messages": [{"role": "user", "content": "Which river runs through Rome?"}], "max_tokens": 32}
    key = ' -H "Authorization: Bearer $KEY"' if options.api_keys else ""
    line = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    if options.model:
        return f"serving {options.model} at {url}\n{line}"
    return (
        f'serving at {url}\nNo --model: a request names a folder or a hub id in its field "model". To serve one from '
        "the start, pass it: --model OWNER/NAME, or --model demo for a small one (93 MB)."
    )
