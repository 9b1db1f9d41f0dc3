"""What goes wrong on purpose: a layer at a chosen forward pass, a copy at a chosen call, Ctrl-C at a chosen line.

A fuse in a middle layer of a model raises, or it spoils the layer's output so that its evaluation fails.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

import radixcache
from radixcache.layers.layout import Layout


@dataclass
class Fuse:
    """Counts the forward passes through one layer, and does something else at one of them.

    Attributes:
        blow: called at pass `at` (from 1 on) with a function that runs the layer; its result is the layer's.
        passes: how many forward passes reached the layer.
        done: tokens of the passes that left it.
    """

    at: int = 0
    blow: Callable[[Callable[[], Any]], Any] = field(default=lambda run: run())
    passes: int = 0
    done: int = 0

    def __call__(self, tokens: int, run: Callable[[], Any]) -> Any:
        self.passes += 1
        result = self.blow(run) if self.passes == self.at else run()
        self.done += tokens
        return result


@contextmanager
def fused(model: Any, fuse: Fuse) -> Iterator[Fuse]:
    """Put a fuse into the middle layer of a model."""
    layer = model.layers[len(model.layers) // 2]
    plain = type(layer)

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        return fuse(int(x.shape[1]), lambda: plain.__call__(self, x, *args, **kwargs))

    layer.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    try:
        yield fuse
    finally:
        layer.__class__ = plain


def raising(error: type[BaseException], after: bool) -> Callable[[Callable[[], Any]], Any]:
    """Raise before the layer has run, or after it wrote its cache."""

    def blow(run: Callable[[], Any]) -> Any:
        if after:
            run()
        raise error("blown")

    return blow


def spoiling(poison: Callable[[], mx.array]) -> Callable[[Callable[[], Any]], Any]:
    """Make the evaluation of all that follows from the layer fail."""

    def blow(run: Callable[[], Any]) -> Any:
        result = run()
        return (result[0] + poison(), *result[1:]) if isinstance(result, tuple) else result + poison()

    return blow


def refused_product() -> mx.array:
    """A scalar whose evaluation is refused before it is dispatched, and again each time it is asked for."""
    half = mx.ones((4, 4), mx.float16)
    return mx.gather_mm(half, half[None], None, mx.array([0]), stream=mx.cpu).sum().astype(mx.float32)


def failed_decomposition() -> mx.array:
    """A scalar whose evaluation fails while it runs: MLX raises once, then takes what it left behind for the result."""
    return mx.linalg.eigh(mx.full((3, 3), mx.nan), stream=mx.cpu)[0].sum()


@dataclass
class FailingCopies:
    """Lets the calls number `at` to `at + times - 1` of one method of Layout fail as MLX's allocator does."""

    method: str
    at: int
    times: int
    error: type[Exception]
    calls: int = 0

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[FailingCopies]:
        original = getattr(Layout, self.method)

        def call(layout: Layout, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.at <= self.calls < self.at + self.times:
                raise self.error("[malloc] Unable to allocate 4096 bytes.")
            return original(layout, *args, **kwargs)

        with patch.context() as scope:
            scope.setattr(Layout, self.method, call)
            yield self

    @property
    def reached(self) -> bool:
        return self.calls >= self.at


@contextmanager
def interruptible() -> Iterator[None]:
    """Python's own handler for SIGINT, whatever was there before; a signal that comes late does nothing."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGINT, previous)


@dataclass
class LineInterrupt:
    """Sends this process SIGINT when the interpreter reaches a chosen line of the package, counted as it goes."""

    at: int
    lines: int = 0

    @contextmanager
    def installed(self) -> Iterator[LineInterrupt]:
        package = os.path.dirname(radixcache.__file__)

        def watch(frame: FrameType, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.startswith(package):
                return None
            if event == "line":
                self.lines += 1
                if self.lines == self.at:
                    signal.raise_signal(signal.SIGINT)
            return watch

        previous = sys.gettrace()
        sys.settrace(watch)
        try:
            yield self
        finally:
            sys.settrace(previous)
