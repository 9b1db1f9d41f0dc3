"""The module that users import `ParallelGenerator` from."""

from runner.engine.generator import ParallelGenerator

__all__ = ["ParallelGenerator"]
