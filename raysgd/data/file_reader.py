"""Rows of a dataset that is made of files. Worker side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.data.file_blocks import FileBlocks
from raysgd.data.ledger import Deal
from raysgd.data.loading import LoadedBlocks, Lookahead
from raysgd.data.plan import Source
from raysgd.data.reader import ChosenRows, TableReader


class FileReader(TableReader):
    """Reads some columns of the files, each part once in an epoch, ahead of the loop.

    Args:
        name: The dataset's, for messages.
        source: Of the kind ``files``.
        files: Its blocks.
        columns: Those that are read; all by default.
        chosen: See `TableReader`.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        files: FileBlocks,
        columns: Sequence[str] | None = None,
        chosen: ChosenRows | None = None,
    ) -> None:
        names = list(files.schema.names if columns is None else columns)
        blocks = LoadedBlocks(lambda number: files.load(number, names))
        super().__init__(name, source, blocks, files.schema, chosen)
        self._files = files
        self._loaded = blocks
        self._selected: dict[tuple[str, ...], FileReader] = {tuple(names): self}

    def select(self, columns: Sequence[str]) -> FileReader:
        key = tuple(columns)
        if key not in self._selected:
            self._selected[key] = FileReader(self._name, self._source, self._files, key, self._chosen)
            self._selected[key].making = self.making
        return self._selected[key]

    def follow(self, deal: Deal, order: Any, start: int) -> Lookahead:
        return Lookahead(self._loaded, self._source.block_rows, deal, order, start, self._forget)

    def sample_row(self) -> int:
        held = self._loaded.held
        if not held:
            return 0
        start = self._start(held[-1])
        return start if self._chosen is None else self._chosen.at_or_after(start)

    def close(self) -> None:
        self.making.stop()
        for reader in self._selected.values():
            reader._let_go()
