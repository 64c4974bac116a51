"""A text file that only ever grows, a line at a time, each durable against the death of its process once written."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK = 1 << 16


class AppendFile:
    """Opens the file at its end, after dropping a last line that a killed writer left unfinished.

    A line is one write to the operating system and nothing is held back, so a reader sees each line at once and the
    bytes written are those of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        _drop_torn_line(path)

    def write_line(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode("utf-8", "replace"))
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:  # a full disk: take back the part of the line, or the next one would go on from it
            self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            raise

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(position - _BLOCK, 0)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position != end:
            file.truncate(position)
