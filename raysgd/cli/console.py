"""What all commands share: exit statuses, common flags, tables and JSON. Driver side.

rich is imported when a table is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from raysgd._util.json import take_nonfinite
from raysgd._util.tables import ANY_WIDTH, as_text, make_table

#: The least width of a column whose cells are folded.
_FOLDED_WIDTH = 40
F = TypeVar("F", bound=Callable[..., Any])

#: Exit statuses. A command does what it says, or it finds that something is wrong, or its words cannot work.
SUCCEEDED, FAILED, USAGE_ERROR = 0, 1, 2
#: The exit status for a signal is this and its number, as in shells.
SIGNALLED = 128
INTERRUPTED = SIGNALLED + 2
#: Words that have a colour on a terminal: states of runs, and of what `raysgd doctor` finds.
_STYLES: dict[Any, str] = {
    **dict.fromkeys(("running", "starting", "live", "ok"), "green"),
    **dict.fromkeys(("recovering", "paused", "silent", "warning"), "yellow"),
    **dict.fromkeys(("error", "wrong", "failure"), "red"),
}


def whole_number(minimum: int, maximum: int | None = None) -> click.IntRange:
    """Return the type of a flag whose value is an integer in a range."""
    kind = click.IntRange(minimum, maximum)
    kind.name = "integer"  # messages say "not a valid integer range" else
    return kind


def number(minimum: float) -> click.FloatRange:
    """Return the type of a flag whose value is a number from ``minimum`` on."""
    kind = click.FloatRange(min=minimum)
    kind.name = "number"
    return kind


def json_flag(function: F) -> F:
    """Decorate a command: it has the flag ``--json``, given as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def address_flag(function: F) -> F:
    """Decorate a command: it has the flag ``--address`` of the Ray cluster, given as the argument ``address``."""
    text = "The Ray cluster, HOST:PORT (default: as RAY_ADDRESS says, else one that runs on this machine)."
    return click.option("--address", metavar="HOST:PORT", help=text)(function)


def storage_flag(function: F) -> F:
    """Decorate a command: it has the flag ``--storage-path`` of runs, given as the argument ``storage_path``."""
    from raysgd.config.run import DEFAULT_STORAGE_PATH

    text = f"Folder, or URI, that holds the folders of runs (default: {DEFAULT_STORAGE_PATH})."
    return click.option("--storage-path", metavar="PATH", default=DEFAULT_STORAGE_PATH, help=text)(function)


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print a value as standard JSON: numbers that are not finite are null, other objects are text.

    Args:
        value: The value.
        is_line: It is one of several values, each of which is a line.
    """
    text = json.dumps(take_nonfinite(value)[0], indent=None if is_line else 2, default=_as_plain)
    print(text, flush=is_line)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """Print rows of texts under the names of their columns; without a terminal as wide as they are, and without colours.

    On a terminal, only cells of the last column are folded: a name that is cut in two can neither be read nor copied.

    Args:
        columns: The names; all empty: no head is shown.
        rows: The cells of each row; None is shown as ``-``.
        right: The columns whose cells are aligned to the right.
    """
    from rich.console import Console
    from rich.measure import Measurement

    table = make_table(columns, rows, right=right, styles=_STYLES)
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        *whole, last = table.columns
        for column in whole:
            column.no_wrap = True
        options = console.options.update(max_width=ANY_WIDTH)
        widths = [Measurement.get(console, options, each).maximum for each in (table, *last.cells)]
        needed = widths[0] - max(0, max(widths[1:], default=0) - _FOLDED_WIDTH)
        console.width = max(console.width, needed)  # the terminal continues what is wider on its next line
        console.print(table)
    else:
        print(as_text(table))


def open_in_browser(address: str) -> None:
    """Open a page with the program that the system has for it; say so if there is none."""
    if click.launch(address) != SUCCEEDED:
        print_error(f"no program was found that opens {address}; open it yourself.")


def print_error(text: str) -> None:
    """Print a line for the user, apart from what the command prints for programs."""
    print(text, file=sys.stderr, flush=True)


def _as_plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy
        return value.item()
    return str(value)
