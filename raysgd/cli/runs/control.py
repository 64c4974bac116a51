"""``raysgd attach``, ``pause``, ``resume`` and ``stop``: control a detached run; ``restore`` starts a run again. Driver side."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import click

from raysgd._util.redact import REDACTED
from raysgd.callbacks.progress.callback import Mode, ProgressCallback
from raysgd.cli import cluster
from raysgd.cli.console import (
    FAILED,
    INTERRUPTED,
    SUCCEEDED,
    address_flag,
    json_flag,
    print_error,
    print_json,
    storage_flag,
    whole_number,
)
from raysgd.cli.runs.completing import run_argument, trainer_argument
from raysgd.cli.runs.finding import find_run
from raysgd.config.argument_names import nearest
from raysgd.errors import ConfigError, UsageError, WorkerError

if TYPE_CHECKING:
    from raysgd.result import RunStatus
    from raysgd.trainer.trainer import Trainer


def attach_to(name: str, address: str | None) -> Trainer:
    """Attach to a detached Trainer.

    Raises:
        ConfigError: There is no cluster, or no such Trainer in it; the message names the nearest.
    """
    cluster.must_connect(address)
    from raysgd.trainer.trainer import Trainer

    try:
        return Trainer.attach(name)
    except UsageError:
        names = [trainer.alias for trainer in cluster.live_trainers() if trainer.alias is not None]
        listed = f"; there are {', '.join(map(repr, names))}" if names else "; none is in this cluster"
        raise ConfigError(
            f"there is no detached Trainer {name!r}{nearest(name, names)}{listed}. `raysgd run --detached --name NAME`, or "
            "`raysgd train` with `--trainer.detached true`, makes one; `raysgd restore RUN` starts a run again that was lost."
        ) from None


# -- attach ------------------------------------------------------------------------------------------------------------


@click.command("attach")
@trainer_argument()
@click.option(
    "--progress", type=click.Choice(get_args(Mode)), default="auto", show_default=True, help="How results are shown."
)
@click.option("--from-iteration", type=whole_number(0), default=0, metavar="N", help="First result for --json.")
@address_flag
@json_flag
def attach_command(name: str, progress: Mode, from_iteration: int, address: str | None, as_json: bool) -> int:
    """Show the run of the detached Trainer NAME until it ends: a live table, or with --json a line for each result.

    Ctrl-C leaves the run as it is. The exit status is 1 if the run fails.
    """
    trainer = attach_to(name, address)
    display = None if as_json else ProgressCallback(mode=progress)
    with _run_of(name):
        stream = trainer._latest.open_stream(from_iteration, display)
    try:
        for result in stream:
            if as_json:
                print_json(dict(result), is_line=True)
    except KeyboardInterrupt:
        if display is not None:
            display.leave()
        print_error(f"left the run, which continues; `raysgd attach {name}` shows it again.")
        return INTERRUPTED
    except BrokenPipeError:  # of this command's own output
        raise
    except Exception as error:  # the run's own
        print_error(f"raysgd attach: the run failed: {type(error).__name__}: {error}")
        return FAILED
    return SUCCEEDED


# -- pause, resume, stop -----------------------------------------------------------------------------------------------


def _show(name: str, status: RunStatus, as_json: bool, done: str) -> None:
    if as_json:
        print_json(vars(status))
    else:
        print(f"{name}: {done}; {status.name} is {status.state} at iteration {status.iteration}.")


@click.command("pause")
@trainer_argument()
@address_flag
@json_flag
def pause_command(name: str, address: str | None, as_json: bool) -> int:
    """Pause the run of the detached Trainer NAME at its next checkpoint, and free its workers.

    The command waits until that is done. Exit status 1 if the run ended before it saved again.
    """
    trainer = attach_to(name, address)
    with _run_of(name):
        was_paused = trainer.status().state == "paused"
        status = trainer.pause()
    is_paused = status.state == "paused"
    done = "paused before" if was_paused else "paused" if is_paused else "not paused, because the run has ended"
    _show(name, status, as_json, done)
    return SUCCEEDED if is_paused else FAILED


@click.command("resume")
@trainer_argument()
@address_flag
@json_flag
def resume_command(name: str, address: str | None, as_json: bool) -> int:
    """Resume the paused run of the detached Trainer NAME."""
    trainer = attach_to(name, address)
    with _run_of(name):
        was_paused = trainer.status().state == "paused"
        trainer.resume()
    _show(name, trainer.status(), as_json, "resumed" if was_paused else "not resumed, because it was not paused")
    return SUCCEEDED


@click.command("stop")
@trainer_argument()
@click.option("--shutdown", is_flag=True, help="End the Trainer, too: its workers and its name are free then.")
@address_flag
@json_flag
def stop_command(name: str, shutdown: bool, address: str | None, as_json: bool) -> int:
    """End the run of the detached Trainer NAME now; its checkpoints stay."""
    trainer = attach_to(name, address)
    with _run_of(name):
        stream = trainer.stream()
        status = trainer.status()
        trainer.cancel()
    with contextlib.suppress(Exception):  # that it was cancelled, or how it had ended before
        stream.get_returns()
    with contextlib.suppress(WorkerError):  # the command that started the run may have ended the Trainer meanwhile
        status = trainer.status()
    if shutdown:
        trainer.shutdown()
    _show(name, status, as_json, "ended")
    return SUCCEEDED


@contextlib.contextmanager
def _run_of(name: str) -> Iterator[None]:
    """Turn the error of a Trainer without a run into one of usage."""
    try:
        yield
    except UsageError as error:
        raise ConfigError(f"{name} has had no run: {error}") from None


# -- restore -----------------------------------------------------------------------------------------------------------


@click.command("restore", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@run_argument()
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
@storage_flag
def restore_command(run: str, flags: tuple[str, ...], storage_path: str) -> int:
    """Start RUN again from its newest checkpoint, by the command line that started it, in the same working folder.

    RUN is a folder or a name in the storage path. The new run gets a folder next to it. FLAGS of the command that started
    it, such as --num-workers 4 for a run of `raysgd run`, replace those that were given then.
    """
    from raysgd.controller.journal.journal import read_description

    folder = find_run(run, storage_path)
    cluster.disconnect()  # the run connects in its own way
    description = read_description(folder)
    words: list[str] = description.get("command_line") or []
    if not words:
        command = " ".join(description.get("command") or ["its program"])
        raise ConfigError(
            f"{run} was not started by the command raysgd, but by {command}; raysgd.Trainer.restore({folder.uri!r}) in a "
            "program starts it again."
        )
    if any(REDACTED in word for word in words):
        raise ConfigError(
            f"the command line of {run} holds secrets, which its files leave out: {' '.join(words)}. Give the command line "
            f"again, with --resume-from {folder.uri}."
        )
    place = description.get("folder")
    if place is not None:
        try:
            os.chdir(place)
        except OSError as error:
            raise ConfigError(f"the working folder of {run} cannot be entered: {error}; make it, or link it.") from None
    from raysgd.cli.main import find_module

    restart = getattr(importlib.import_module(find_module(words[0])), "restart", None)
    if restart is None:
        raise ConfigError(
            f"runs of `raysgd {words[0]}` are not restored by this command; give it the run's folder itself."
        )
    return int(restart(words[1:], folder.uri, flags))
