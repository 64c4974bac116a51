"""``raysgd report``: writes a page about runs, as one HTML file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import click

from raysgd.cli.console import FAILED, SUCCEEDED, json_flag, open_in_browser, print_error, print_json, storage_flag
from raysgd.cli.runs.completing import run_argument

_DEFAULT_FILE = "raysgd-report.html"


@click.command(
    "report",
    help="Write a page about one or more runs: one HTML file with curves, timeline, config and errors. It loads nothing from "
    "a network. RUN is as for `raysgd status`: a folder, or a name in the storage path.",
)
@run_argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE", default=_DEFAULT_FILE, help=f"The file (default: {_DEFAULT_FILE}).")
@click.option("--open", "opens", is_flag=True, help="Open the file in a browser.")
@storage_flag
@json_flag
def command(runs: tuple[str, ...], output: str, opens: bool, storage_path: str, as_json: bool) -> int:
    """Write the page and print where it is."""
    from raysgd.cli.runs.finding import find_run
    from raysgd.errors import CheckpointNotFoundError
    from raysgd.viewer.page import write_file
    from raysgd.viewer.run_data import RunData

    path = Path(output).expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise click.UsageError(f"--output {output}: give a file in a folder that exists.")
    folders = [find_run(run, storage_path) for run in runs]
    try:
        _write(path, write_file([RunData(folder) for folder in folders]))
    except CheckpointNotFoundError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        print_error(f"raysgd report: {path} could not be written: {error}")
        return FAILED
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": size_bytes, "runs": [folder.path_of("") for folder in folders]})
    else:
        print(path)
    if opens:
        open_in_browser(path.as_uri())
    return SUCCEEDED


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write a file at once: a reader sees the old file or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(parts)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
