"""The table that `Trainer` prints: the resources of each worker, and their total out of the cluster's. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResourceTable:
    """A row for each worker, and a row of totals.

    Attributes:
        title: The line above the table.
        bundle: The resources of one worker.
        nodes: The node of each worker; ``"-"`` for a worker that is not placed yet.
        cluster: The resources of the cluster; None: this process is not connected to Ray.
    """

    title: str
    bundle: Mapping[str, float]
    nodes: Sequence[str]
    cluster: Mapping[str, float] | None

    def text(self) -> str:
        """Return the table as lines of text."""
        rows = [self._header(), *self._rows(), self._totals()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(self._cell(row[i], widths[i], i) for i in range(len(row))).rstrip() for row in rows]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def html(self) -> str:
        """Return the table as HTML for a notebook."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        head, foot = row(self._header(), "th"), row(self._totals(), "th")
        body = "".join(row(cells, "td") for cells in self._rows())
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"

    @property
    def _names(self) -> list[str]:
        return ["CPU", "GPU", *sorted(set(self.bundle) - {"CPU", "GPU"})]

    def _header(self) -> list[str]:
        return ["worker", "node", *self._names]

    def _rows(self) -> list[list[str]]:
        amounts = [_number(self.bundle.get(name, 0)) for name in self._names]
        return [[str(index), node, *amounts] for index, node in enumerate(self.nodes)]

    def _totals(self) -> list[str]:
        cells = []
        for name in self._names:
            total = _number(len(self.nodes) * self.bundle.get(name, 0))
            cells.append(total if self.cluster is None else f"{total} of {_number(self.cluster.get(name, 0))}")
        return ["total", "" if self.cluster is None else "of the cluster", *cells]

    @staticmethod
    def _cell(text: str, width: int, column: int) -> str:
        return text.ljust(width) if column < 2 else text.rjust(width)


def _number(value: Any) -> str:
    return f"{value:g}"
