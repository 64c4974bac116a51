"""Tables of rich, and what they look like as lines of text and as HTML. rich is imported when a table is made."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

#: Wider than any line: a program, a pager or a notebook gets one line for each row.
ANY_WIDTH = 100_000
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    totals: Sequence[str] = (),
    styles: Mapping[Any, str] | None = None,
) -> Table:
    """Make a table of rows of texts. Its lines have ASCII characters alone, so that any terminal and log can hold them.

    Args:
        columns: The names; all empty: no head is shown.
        rows: The cells of each row; None is shown as ``-``.
        right: The columns whose cells are aligned to the right.
        totals: The cells below the rows; none: there is no such row.
        styles: Words that have a colour on a terminal.
    """
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    has_header = any(columns)
    lines = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True) if has_header else None
    table = Table(
        box=lines,
        show_header=has_header,
        show_edge=False,
        pad_edge=False,
        show_footer=bool(totals),
        header_style="bold",
    )
    for place, column in enumerate(columns):
        justify = "right" if column in right else "left"
        footer = Text(totals[place]) if totals else ""
        table.add_column(Text(column), footer, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        cells = (Text("-", "dim") if cell is None else Text(str(cell), (styles or {}).get(cell, "")) for cell in row)
        table.add_row(*cells)
    return table


def as_text(*shown: RenderableType, width: int = ANY_WIDTH) -> str:
    """Return what rich draws as lines without colours and without blanks at their ends."""
    text = _draw(shown, width).export_text()
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_html(*shown: RenderableType, width: int = ANY_WIDTH) -> str:
    """Return what rich draws as an element of HTML, for a notebook."""
    return _draw(shown, width).export_html(inline_styles=True, code_format=_HTML)


def _draw(shown: Iterable[RenderableType], width: int) -> Console:
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=width, height=100, force_jupyter=False, highlight=False)
    for each in shown:
        console.print(each)
    return console
