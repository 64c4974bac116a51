"""The entry point of the console script ``raysgd``: finds the sub-command, and turns errors of usage into exit status 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from raysgd._version import __version__
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError

#: The exit status for a command line that cannot work, and for Ctrl-C, as shells have it.
USAGE_ERROR = 2
INTERRUPTED = 130


class Command(Protocol):
    """A module with a sub-command."""

    def execute(self, words: Sequence[str]) -> int:
        """Run the command with the words after its name; return the exit status.

        Raises:
            ConfigError: The words cannot work.
        """


#: The sub-commands: their modules, and what they do. A module is imported when its command runs.
COMMANDS = {"run": ("raysgd.cli.run", "run a script on workers of a Ray cluster")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    Args:
        argv: The words after ``raysgd``. None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"raysgd {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"raysgd: {name} is not a command{nearest(name, COMMANDS)}; `raysgd --help` lists them.", file=sys.stderr)
        return USAGE_ERROR
    try:
        command = cast("Command", importlib.import_module(COMMANDS[name][0]))
        return command.execute(words[1:])
    except ConfigError as error:
        print(f"raysgd {name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: raysgd COMMAND ...",
            "",
            "Distributed training on Ray.",
            "",
            "commands:",
            *lines,
            "",
            "`raysgd COMMAND --help` shows the flags of a command.",
        ]
    )
