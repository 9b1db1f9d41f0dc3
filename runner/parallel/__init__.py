"""Many replies at once, on one PrefixCache."""

from runner.parallel.generator import ParallelGenerator

__all__ = ["ParallelGenerator"]
