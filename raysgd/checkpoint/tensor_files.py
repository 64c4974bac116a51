"""Reading the tensors of a part, from storage or from memory, each into memory of its own.

Not views on one large buffer: that would live as long as the last tensor of it, and a tensor at an odd address makes
some BLAS kernels sum in another order, so that a resumed run would not be bit-identical. Runs in workers and drivers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, final

import numpy as np

from raysgd.checkpoint.checksum import CHUNK_BYTES, Checksum
from raysgd.checkpoint.leaves import ByteArray, StoredLeaf
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.tensors import LENGTH_BYTES, TensorSpec, decode_header, header_length
from raysgd.checkpoint.verify import check_size, mismatch
from raysgd.errors import CheckpointCorruptError

_ALIGNMENT = 64  # what torch gives its own tensors
_SMALL_BYTES = 1 << 20  # tensors below this are read many at a time


@final
class Leaves:
    """Tensors by name, as a `LeafSource`."""

    def __init__(self, leaves: Iterable[tuple[str, StoredLeaf]] = ()) -> None:
        self._leaves = dict(leaves)

    def get(self, reference: Any) -> StoredLeaf:
        return self._leaves[reference]


def copy_leaves(file: ByteArray, where: str) -> Leaves:
    """The tensors of a file that is in memory."""
    specs = specs_in(file, where).values()
    return Leaves((spec.name, _leaf(spec, _aligned_copy(file[spec.begin : spec.end]))) for spec in specs)


def read_leaves(directory: Storage, entry: FileEntry, *, verify: bool) -> Leaves:
    """The tensors of a file on storage, read once and straight to where they stay.

    Raises:
        CheckpointCorruptError: Its size, structure or (with ``verify``) checksum is not right.
    """
    check_size(directory, entry)
    return directory.read_with(entry.name, lambda stream: _read(stream, directory, entry, verify))


def read_specs(directory: Storage, entry: FileEntry) -> dict[str, TensorSpec]:
    """Which tensors a file on storage has, and where.

    Raises:
        CheckpointCorruptError: Its size or structure is not right.
    """
    check_size(directory, entry)
    where = directory.path_of(entry.name)

    def read(stream: BinaryIO) -> list[TensorSpec]:
        reader = _Reader(stream, None, where)
        start = reader.read(min(LENGTH_BYTES, entry.size))
        header = reader.read(header_length(start.data, entry.size, where))
        return decode_header(start.tobytes() + header.tobytes(), entry.size, where)

    return {spec.name: spec for spec in directory.read_with(entry.name, read)}


def read_stretch(directory: Storage, name: str, begin: int, area: ByteArray) -> None:
    """Fill ``area`` with what stands in a file from byte ``begin`` on.

    Raises:
        CheckpointCorruptError: The file ends before.
    """
    where = directory.path_of(name)

    def read(stream: BinaryIO) -> None:
        stream.seek(begin)
        _Reader(stream, None, where).read_into(area)

    directory.read_with(name, read)


def specs_in(file: ByteArray, where: str) -> dict[str, TensorSpec]:
    """Which tensors a file that is in memory has, and where."""
    specs = decode_header(file[: LENGTH_BYTES + header_length(file.data, file.size, where)].tobytes(), file.size, where)
    return {spec.name: spec for spec in specs}


def _read(stream: BinaryIO, directory: Storage, entry: FileEntry, verify: bool) -> Leaves:
    with Checksum() as checksum:
        reader = _Reader(stream, checksum, directory.path_of(entry.name))
        start = reader.read(min(LENGTH_BYTES, entry.size))
        header = reader.read(header_length(start.data, entry.size, reader.where))
        specs = decode_header(start.tobytes() + header.tobytes(), entry.size, reader.where)
        leaves = Leaves(leaf for stretch in _stretches(specs) for leaf in reader.read_stretch(stretch))
        if verify and checksum.result() != entry.crc32:
            raise mismatch(directory, entry)
        return leaves


def _stretches(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Neighbours to be read at once: a large tensor alone, small ones together."""
    stretch: list[TensorSpec] = []
    for spec in specs:
        is_large = spec.end - spec.begin >= _SMALL_BYTES
        if stretch and (is_large or spec.end - stretch[0].begin > CHUNK_BYTES):
            yield stretch
            stretch = []
        stretch.append(spec)
        if is_large:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


class _Reader:
    """Reads a stream from where it stands, summing what it reads, if that is asked for."""

    def __init__(self, stream: BinaryIO, checksum: Checksum | None, where: str) -> None:
        self.where = where
        self._stream = stream
        self._checksum = checksum

    def read(self, num_bytes: int) -> ByteArray:
        """The next bytes, in new and aligned memory."""
        area = aligned_empty(num_bytes)
        self.read_into(area)
        return area

    def read_into(self, area: ByteArray) -> None:
        """Fill an area with the next bytes."""
        done = 0
        while done < area.size:
            count = self._stream.readinto(area.data[done : done + CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(f"{self.where} ends in the middle of a tensor or its header")
            if self._checksum is not None:
                self._checksum.update(area.data[done : done + count])
            done += count

    def read_stretch(self, specs: list[TensorSpec]) -> Iterator[tuple[str, StoredLeaf]]:
        start = specs[0].begin
        block = self.read(specs[-1].end - start)
        for spec in specs:
            data = block if len(specs) == 1 else _aligned_copy(block[spec.begin - start : spec.end - start])
            yield spec.name, _leaf(spec, data)


def _leaf(spec: TensorSpec, data: ByteArray) -> StoredLeaf:
    return StoredLeaf(spec.dtype, spec.shape, data)


def aligned_empty(num_bytes: int) -> ByteArray:
    """New memory, aligned as torch aligns its own."""
    memory: ByteArray = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes]


def _aligned_copy(data: ByteArray) -> ByteArray:
    copy = aligned_empty(data.size)
    copy[:] = data
    return copy
