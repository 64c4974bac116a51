"""``raysgd ui``: serves the page of the runs in a folder to a browser on this machine, until Ctrl-C."""

from __future__ import annotations

import ipaddress
import sys
import threading

import click

from raysgd.cli.console import (
    FAILED,
    SUCCEEDED,
    json_flag,
    open_in_browser,
    print_error,
    print_json,
    storage_flag,
    whole_number,
)
from raysgd.config.run import DEFAULT_STORAGE_PATH

_LOOPBACK = "127.0.0.1"
#: Ctrl-C is noticed between two waits of this length, also where a lock cannot be interrupted.
_WAIT_S = 3600.0


@click.command(
    "ui",
    help="Show the runs in FOLDER, or in the storage path, in a browser, with new points while training continues. Ctrl-C "
    "ends it. The printed address has a token; without it the page shows nothing.",
)
@click.argument("folder", required=False)
@click.option("--host", default=_LOOPBACK, show_default=True, help="The address to listen at.")
@click.option("--port", type=whole_number(0, 65535), default=0, help="The port (default: a free one).")
@click.option(
    "--tensorboard",
    metavar="DIR",
    help="Also show the runs of TensorBoard's event files in this folder and those below it.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@storage_flag
@json_flag
def command(
    folder: str | None,
    host: str,
    port: int,
    tensorboard: str | None,
    opens: bool,
    storage_path: str,
    as_json: bool,
) -> int:
    """Serve until Ctrl-C."""
    from raysgd.cli.runs.finding import existing_folder
    from raysgd.cli.runs.logs import Reader
    from raysgd.viewer.catalog import Catalog
    from raysgd.viewer.server import ViewerServer

    folder = folder or storage_path
    storage = existing_folder(folder)
    if folder != DEFAULT_STORAGE_PATH and not storage.exists():
        raise click.UsageError(f"{storage.path_of('')} does not exist: give the folder that holds runs.")
    event_files = None if tensorboard is None else existing_folder(tensorboard)
    if event_files is not None and not (event_files.is_local and event_files.exists()):
        raise click.UsageError(
            f"--tensorboard {tensorboard} is not a folder on this machine; give one with event files."
        )
    try:
        server = ViewerServer(
            Catalog(storage, event_files),
            host,
            port,
            read_output=Reader(None).read,
            is_editable=_is_loopback(host),
        )
    except OSError as error:
        print_error(
            f"raysgd ui: cannot listen at {host}, port {port}: {error.strerror or error}; give another --host or --port."
        )
        return FAILED
    if not _is_loopback(host):
        print_error(
            f"raysgd ui: other machines can connect to {host}, without encryption; only the token protects the page."
        )
    server.start()
    try:
        if as_json:
            print_json({"address": server.address, "folder": storage.path_of("")})
        else:
            print(f"{storage.path_of('')}: {server.address}  (Ctrl-C ends it)")
        sys.stdout.flush()
        if opens:
            open_in_browser(server.address)
        while not threading.Event().wait(_WAIT_S):
            pass
    finally:
        server.close()
    return SUCCEEDED


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
