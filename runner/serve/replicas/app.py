"""The application where there are replicas: the same routes, and another Running behind them."""

from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI

from runner.serve.app import assembled
from runner.serve.options import ServeOptions
from runner.serve.replicas.fleet import END_S, Fleet
from runner.serve.replicas.pages import replica_routes
from runner.serve.replicas.scrape import Scrape


def make_replicas_app(options: ServeOptions, fleet: Fleet) -> FastAPI:
    """Return the application. `fleet` need not have started.

    Raises:
        KeyFileError: a file of keys cannot be used.
    """
    scrape = Scrape(fleet.switchboard.lines)
    # Replicas end replies in time; this ends those of a replica that does not.
    patient = replace(options, request_timeout_s=options.request_timeout_s + END_S)
    return assembled(patient, fleet, fleet.count_tokens, replica_routes(fleet, scrape), scrape.on_http)
