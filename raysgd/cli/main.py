"""The entry point of the console script ``raysgd``: finds the sub-command, and turns errors of usage into exit status 2."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from raysgd._version import __version__
from raysgd.cli.console import FAILED, INTERRUPTED, SUCCEEDED, USAGE_ERROR, print_error
from raysgd.config.argument_names import nearest
from raysgd.errors import CheckpointNotFoundError, ConfigError, RaySGDError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: The sub-commands: their modules, each with an attribute ``command``, and what they do. A module is imported when its command
#: runs, so ``--help`` and the completion of names import none.
#: A module may also name its attribute: ``module:attribute``.
COMMANDS = {
    "run": ("raysgd.cli.run", "Run a script on workers of a Ray cluster."),
    "train": ("raysgd.cli.train", "Train a model as a YAML file says."),
    "import-config": ("raysgd.cli.import_config", "Write a file for `raysgd train` from one of another trainer."),
    "ls": ("raysgd.cli.runs.listing:list_command", "List runs, live and finished."),
    "status": ("raysgd.cli.runs.listing:status_command", "Show the state of a run."),
    "logs": ("raysgd.cli.runs.logs", "Show what the workers of a run printed."),
    "attach": ("raysgd.cli.runs.control:attach_command", "Show a detached run until it ends."),
    "pause": ("raysgd.cli.runs.control:pause_command", "Pause a detached run at its next checkpoint."),
    "resume": ("raysgd.cli.runs.control:resume_command", "Resume a paused run."),
    "stop": ("raysgd.cli.runs.control:stop_command", "End a detached run; its checkpoints stay."),
    "restore": ("raysgd.cli.runs.control:restore_command", "Start a run again from its newest checkpoint."),
    "annotate": ("raysgd.cli.runs.keeping:annotate_command", "Give a run a title, tags and notes."),
    "rm": ("raysgd.cli.runs.keeping:rm_command", "Delete runs with their checkpoints."),
    "why": ("raysgd.cli.runs.why", "Say what a run's time was used for, and what made it slow."),
    "trace": ("raysgd.cli.runs.trace", "Write the steps of all ranks on one clock, as a file for Perfetto."),
    "compare": ("raysgd.cli.runs.listing:compare_command", "Find where two runs first differ."),
    "report": ("raysgd.cli.report", "Write a page about runs, as one HTML file."),
    "ui": ("raysgd.cli.ui", "Show the runs in a folder in a browser, also live ones."),
    "ckpt": ("raysgd.cli.checkpoints", "List, check, merge and export checkpoints."),
    "plan": ("raysgd.cli.plan", "Choose strategies by which a model fits into the memory of its devices."),
    "doctor": ("raysgd.cli.doctor.command", "Find what is wrong with this machine, or with a cluster."),
}
_NAME = "raysgd"
#: By this variable click completes words in a shell; see doc/guides/command.md.
_COMPLETE = "_RAYSGD_COMPLETE"


class LazyGroup(click.Group):
    """A group whose commands are imported when they run.

    Args:
        modules: The commands: their modules, and what they do.
        **settings: As for `click.Group`.
    """

    def __init__(self, modules: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which users need them."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command; None if it does not exist."""
        if cmd_name not in self._modules:
            return None
        module, _, attribute = self._modules[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names, and the words after it.

        Raises:
            click.UsageError: There is no such command; the message names the nearest.
        """
        name = args[0]
        if name not in self._modules and not name.startswith("-") and not ctx.resilient_parsing:
            known = nearest(name, self._modules)
            raise click.UsageError(f"{name} is not a command{known}; `{ctx.command_path} --help` lists them.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands and what they do."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._modules.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names of commands and options that begin so."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text) for name, (_, text) in self._modules.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def make_command() -> LazyGroup:
    """Make the command ``raysgd``."""
    group = LazyGroup(
        COMMANDS,
        name=_NAME,
        help="Distributed training on Ray.",
        epilog=f"`{_NAME} COMMAND --help` shows the flags of a command.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=False,
        invoke_without_command=True,
        callback=_show_help,
    )
    version = click.version_option(__version__, prog_name=_NAME, message="%(prog)s %(version)s")
    return version(group)


@click.pass_context
def _show_help(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def find_module(name: str) -> str:
    """Return the module of a command.

    Raises:
        ConfigError: There is no such command.
    """
    if name not in COMMANDS:
        raise ConfigError(f"raysgd {name} is not a command of this version.")
    return COMMANDS[name][0].partition(":")[0]


def _with_advice(text: str, path: str) -> str:
    """Return a message, with where the right words are found if it does not say what to do, as those of click."""
    if any(advice in text.lower() for advice in ("--help", "give ", "did you mean")):
        return text
    return f"{text.rstrip('.')}; `{path} --help` shows what to give."


def _command_of(words: Sequence[str]) -> Sequence[str]:
    """Return the words that name the command: one, or two for a command of a group."""
    return words[: 2 if words[:1] == ["ckpt"] else 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status (doc/guides/command.md lists them).

    Args:
        argv: The words after ``raysgd``. None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # The words are the object of the root context: a command records them for `raysgd restore`.
        status = make_command().main(words, prog_name=_NAME, complete_var=_COMPLETE, standalone_mode=False, obj=words)
        sys.stdout.flush()
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if ctx is not None else " ".join([_NAME, *_command_of(words)])
        print_error(f"{path}: {_with_advice(error.format_message(), path)}")
        return error.exit_code
    except RaySGDError as error:
        print_error(f"{' '.join([_NAME, *_command_of(words)])}: {error}")
        return USAGE_ERROR if isinstance(error, (ConfigError, CheckpointNotFoundError)) else FAILED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough; click, too, ends with this status then
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status if isinstance(status, int) else SUCCEEDED
