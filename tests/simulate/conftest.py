"""The command line, for tests of the simulator's commands."""

from tests.commands.conftest import command

__all__ = ["command"]
