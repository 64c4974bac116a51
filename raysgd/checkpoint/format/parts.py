"""One rank's part of a checkpoint: a tensors file (safetensors) and a tree file (JSON), on storage or in memory.

In memory a part is a payload: an array of bytes with both files and a footer that says where they end. A part is read as a
whole (`PartReader.load`), or some of its tensors or stretches of them.

Each tensor is read into memory of its own. Views on one large buffer would keep that buffer alive until the last of its
tensors is freed. At an odd address some BLAS kernels sum in another order, and a resumed run would not be bit-identical.

Runs in workers and drivers.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, final

import numpy as np

from raysgd.checkpoint.codecs.leaves import ByteArray, StoredLeaf
from raysgd.checkpoint.codecs.shards import SHARDS_KEY, ArrayShards, read_table
from raysgd.checkpoint.codecs.tree import Decoder
from raysgd.checkpoint.format.json import parse_json
from raysgd.checkpoint.format.manifest import check_size, mismatch, verify_entries
from raysgd.checkpoint.format.safetensors import LENGTH_BYTES, TensorSpec, decode_header, header_length
from raysgd.checkpoint.storage.files import CHUNK_BYTES, Checksum
from raysgd.checkpoint.storage.names import BLOCK_BYTES, FileEntry, block_size, num_blocks
from raysgd.checkpoint.storage.storage import Storage
from raysgd.errors import CheckpointCorruptError

TENSORS_SUFFIX = ".safetensors"
TREE_SUFFIX = ".json"
IN_MEMORY = "a checkpoint in memory"
_FORMAT = "raysgd-state"
_VERSION = 1
_FOOTER = struct.Struct("<QQ8s")  # bytes of the tensors file, bytes of the tree file, magic
_MAGIC = b"raysgd-1"
FOOTER_BYTES = _FOOTER.size
_ALIGNMENT = 64  # torch aligns its own tensors to this
_SMALL_BYTES = 1 << 20  # tensors below this are read many at a time
#: Memory for a block, for each thread that reads. It is used again, since the system must clear new memory.
_SCRATCH: list[ByteArray] = []


# -- the tree file -------------------------------------------------------------------------------------


def encode_tree(node: Any, shards: Mapping[str, Any]) -> tuple[bytes, int]:
    """Make the content of the tree file.

    Args:
        node: The JSON of the state.
        shards: The table of shards; empty if the part has none.

    Returns:
        The content, and the offset at which the table of shards begins (its end if there is no table).
    """
    document = _dumps({"format": _FORMAT, "version": _VERSION, "state": node})
    if not shards:
        return document, len(document)
    return b'%b,"%b":%b}' % (document[:-1], SHARDS_KEY.encode(), _dumps(shards)), len(document) - 1


def parse_tree(text: bytes, where: str) -> dict[str, Any]:
    """Parse a tree file: a dict with ``"state"``, and ``"shards"`` if the part has array shards.

    Raises:
        CheckpointCorruptError: It is not a tree file of this version.
    """
    document = parse_json(text, where)
    if not isinstance(document, dict) or document.get("format") != _FORMAT or "state" not in document:
        raise CheckpointCorruptError(f"{where} does not hold a state of raysgd")
    if document.get("version") != _VERSION:
        version = document.get("version")
        raise CheckpointCorruptError(f"{where} has version {version!r:.50}; this raysgd reads version {_VERSION}")
    return document


def _dumps(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


# -- the tensors file ----------------------------------------------------------------------------------


def read_leaves(directory: Storage, entry: FileEntry) -> dict[str, StoredLeaf]:
    """Read all tensors of a file on storage, once and straight to where they stay.

    Raises:
        CheckpointCorruptError: Its size, structure or checksum is wrong.
    """
    check_size(directory, entry)

    def read(stream: BinaryIO) -> dict[str, StoredLeaf]:
        with Checksum() as checksum:
            leaves = read_tensors(stream, directory.path_of(entry.name), entry.size, checksum)
            if checksum.result().crc32 != entry.crc32:
                raise mismatch(directory, entry)
            return leaves

    return directory.read_with(entry.name, read)


def read_tensors(stream: BinaryIO, where: str, num_bytes: int, checksum: Checksum) -> dict[str, StoredLeaf]:
    """Read the tensors of a file of ``num_bytes`` from its beginning."""
    reader = _Reader(stream, where, checksum)
    return dict(leaf for group in _group(reader.read_specs(num_bytes)) for leaf in reader.read_tensors(group))


def copy_leaves(file: ByteArray, where: str) -> dict[str, StoredLeaf]:
    """Copy all tensors out of a file that is in memory."""
    specs = _specs_in_memory(file, where)
    return {
        name: StoredLeaf(spec.dtype, spec.shape, _aligned_copy(file[spec.begin : spec.end]))
        for name, spec in specs.items()
    }


def aligned_empty(num_bytes: int) -> ByteArray:
    """Allocate memory, aligned as torch aligns its own."""
    memory: ByteArray = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes]


def _aligned_copy(data: ByteArray) -> ByteArray:
    copy = aligned_empty(data.size)
    copy[:] = data
    return copy


def _specs_in_memory(file: ByteArray, where: str) -> dict[str, TensorSpec]:
    specs = decode_header(file[: LENGTH_BYTES + header_length(file.data, file.size, where)].tobytes(), file.size, where)
    return {spec.name: spec for spec in specs}


def _group(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Group neighbours that are read at once: a large tensor alone, small ones together."""
    group: list[TensorSpec] = []
    for spec in specs:
        is_large = spec.end - spec.begin >= _SMALL_BYTES
        if group and (is_large or spec.end - group[0].begin > CHUNK_BYTES):
            yield group
            group = []
        group.append(spec)
        if is_large:
            yield group
            group = []
    if group:
        yield group


class _Reader:
    """Reads a stream from its current position, and updates the checksum if there is one."""

    def __init__(self, stream: BinaryIO, where: str, checksum: Checksum | None = None) -> None:
        self._stream = stream
        self._where = where
        self._checksum = checksum

    def seek(self, position: int) -> None:
        self._stream.seek(position)

    def read_specs(self, file_bytes: int) -> list[TensorSpec]:
        """Read the header of a file of this size."""
        length = self._read(min(LENGTH_BYTES, file_bytes))
        header = self._read(header_length(length.data, file_bytes, self._where))
        return decode_header(length.tobytes() + header.tobytes(), file_bytes, self._where)

    def read_tensors(self, specs: list[TensorSpec]) -> Iterator[tuple[str, StoredLeaf]]:
        """Read tensors that follow each other."""
        start = specs[0].begin
        block = self._read(specs[-1].end - start)
        for spec in specs:
            data = block if len(specs) == 1 else _aligned_copy(block[spec.begin - start : spec.end - start])
            yield spec.name, StoredLeaf(spec.dtype, spec.shape, data)

    def read_into(self, area: ByteArray) -> None:
        """Fill an area with the next bytes."""
        done = 0
        while done < area.size:
            count = self._stream.readinto(area.data[done : done + CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(f"{self._where} ends in the middle of a tensor or its header")
            if self._checksum is not None:
                self._checksum.update(area.data[done : done + count])
            done += count

    def _read(self, num_bytes: int) -> ByteArray:
        area = aligned_empty(num_bytes)
        self.read_into(area)
        return area


# -- payloads ------------------------------------------------------------------------------------------


def write_footer(payload: ByteArray, num_tensor_bytes: int, num_tree_bytes: int) -> None:
    """Complete a payload in which both files are in place."""
    payload[-FOOTER_BYTES:] = np.frombuffer(_FOOTER.pack(num_tensor_bytes, num_tree_bytes, _MAGIC), np.uint8)


def write_payload(payload: ByteArray, storage: Storage, prefix: str) -> list[FileEntry]:
    """Write the files of a payload: ``{prefix}.safetensors`` (if it has tensors) and ``{prefix}.json``.

    Blocks until both are durable. The payload must not change meanwhile.

    Raises:
        StorageError: Writing still failed after all retries.
    """
    tensors, tree = _split_payload(payload)
    files = [(prefix + TENSORS_SUFFIX, tensors)] if tensors.size else []
    files.append((prefix + TREE_SUFFIX, tree))
    return [FileEntry(name, *storage.write_chunks(name, functools.partial(_chunks, data))) for name, data in files]


def _split_payload(payload: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Return views of the two files in a payload: tensors (empty if there are none) and tree."""
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size < FOOTER_BYTES:
        raise CheckpointCorruptError(f"{IN_MEMORY} is not an array of bytes with a footer")
    num_tensor_bytes, num_tree_bytes, magic = _FOOTER.unpack(payload[-FOOTER_BYTES:].tobytes())
    if magic != _MAGIC or num_tensor_bytes + num_tree_bytes + FOOTER_BYTES != payload.size:
        raise CheckpointCorruptError(f"{IN_MEMORY} has a footer that does not match its size")
    return payload[:num_tensor_bytes], payload[num_tensor_bytes : num_tensor_bytes + num_tree_bytes]


def _chunks(data: ByteArray) -> Iterator[memoryview]:
    for start in range(0, data.size, CHUNK_BYTES):
        yield data.data[start : start + CHUNK_BYTES]


# -- parts ---------------------------------------------------------------------------------------------


def _split_entries(directory: Storage, entries: Sequence[FileEntry]) -> tuple[FileEntry, FileEntry | None]:
    """Find the tree file, and the tensors file if there is one."""
    found = {
        suffix: entry for entry in entries for suffix in (TENSORS_SUFFIX, TREE_SUFFIX) if entry.name.endswith(suffix)
    }
    if TREE_SUFFIX not in found or len(found) != len(entries):
        names = [entry.name for entry in entries]
        raise CheckpointCorruptError(
            f"{directory.path_of('')}: its manifest lists files that do not form a part: {names}"
        )
    return found[TREE_SUFFIX], found.get(TENSORS_SUFFIX)


class PartReader(abc.ABC):
    """Reads a part, or some of its tensors. Nothing is read before it is asked for. Thread-safe.

    What can be wrong with a part raises CheckpointCorruptError: a file is missing, or differs from the manifest or from its
    own header.

    Attributes:
        where: What to call the part in messages.
    """

    where: str

    @abc.abstractmethod
    def read(self, name: str, skip: int, area: ByteArray) -> None:
        """Fill ``area`` with the bytes of a tensor from ``skip`` on."""

    @abc.abstractmethod
    def check(self, name: str, skip: int, num_bytes: int) -> bool:
        """Compare a stretch of a tensor with its checksums before it is read, if this reads no remote storage twice.

        Returns:
            Whether `read` will find no damage, so that it may fill memory that is in use.
        """

    @abc.abstractmethod
    def _tree_text(self) -> bytes: ...

    @abc.abstractmethod
    def _tensor_specs(self) -> dict[str, TensorSpec]: ...

    @abc.abstractmethod
    def _all_leaves(self) -> dict[str, StoredLeaf]: ...

    def load(self, *, allow_pickle: bool) -> Any:
        """Load the state of a part without array shards.

        Raises:
            UnsafeStateError: It holds pickles, and ``allow_pickle`` is False.
        """
        _ = self.state  # first the small file: if it is damaged, the tensors need not be read
        return self.decode(self._all_leaves(), {}, allow_pickle=allow_pickle)

    def decode(self, leaves: Mapping[str, StoredLeaf], arrays: Mapping[str, Any], *, allow_pickle: bool) -> Any:
        """Decode the state of a part whose leaves, and arrays in shards, have been read."""
        decoder = Decoder(leaves.__getitem__, self.where, allow_pickle=allow_pickle, shards=arrays)
        return decoder.decode_state(self.state)

    @functools.cached_property
    def state(self) -> Any:
        """The JSON of the state."""
        return self._document["state"]

    @functools.cached_property
    def shards(self) -> dict[str, ArrayShards]:
        """Its table of shards; empty for a part without shards."""
        return read_table(self._document.get(SHARDS_KEY, {}), self.where)

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Its tensors by name."""
        return self._tensor_specs()

    @property
    def unsharded_names(self) -> list[str]:
        """The tensors that are not shards of an array."""
        shards = {name for array in self.shards.values() for _, name in array.shards}
        return [name for name in self.specs if name not in shards]

    def leaf(self, name: str) -> StoredLeaf:
        """Read one of its tensors."""
        spec = self.specs[name]
        data = aligned_empty(spec.end - spec.begin)
        self.read(name, 0, data)
        return StoredLeaf(spec.dtype, spec.shape, data)

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        return parse_tree(self._tree_text(), self.where)

    def _begin(self, name: str, skip: int, num_bytes: int) -> int:
        """Return where a stretch of a tensor begins in the file."""
        spec = self.specs.get(name)
        if spec is None or skip + num_bytes > spec.end - spec.begin:
            raise CheckpointCorruptError(f"{self.where} names the tensor {name!r}, which is missing or too small")
        return spec.begin + skip


@final
class StoredPart(PartReader):
    """A part on storage. Each block of the tensors file is compared with its checksum when it is first read.

    Args:
        directory: The checkpoint's folder.
        entries: The part's files, as the manifest lists them.
    """

    def __init__(self, directory: Storage, entries: Sequence[FileEntry]) -> None:
        self._directory = directory
        self._tree, self._tensors = _split_entries(directory, entries)
        self._verified: set[int] = set()  # blocks
        self.where = directory.path_of(self._tree.name)

    def read(self, name: str, skip: int, area: ByteArray) -> None:
        begin = self._begin(name, skip, area.size)
        self._read_blocks(begin, area.size, lambda reader, number: self._read_block(reader, number, begin, area))

    def check(self, name: str, skip: int, num_bytes: int) -> bool:
        if not self._directory.is_local:
            return False

        def check(reader: _Reader, number: int) -> None:
            if number not in self._verified:
                with self._reading(reader, number):
                    pass

        self._read_blocks(self._begin(name, skip, num_bytes), num_bytes, check)
        return True

    def _read_blocks(self, begin: int, num_bytes: int, read_block: Callable[[_Reader, int], None]) -> None:
        """Call ``read_block`` for each block of a stretch of the file."""
        tensors = self._tensors
        assert tensors is not None  # as it has a tensor
        size = block_size(tensors.size)
        if not tensors.blocks and tensors.size > size and not self._verified:  # an older manifest
            verify_entries(self._directory, [tensors], checksums=True)
            self._verified.update(range(num_blocks(tensors.size)))

        def read(stream: BinaryIO) -> None:
            reader = _Reader(stream, self._directory.path_of(tensors.name))
            for number in range(begin // size, -(-(begin + num_bytes) // size)):
                read_block(reader, number)

        self._directory.read_with(tensors.name, read)

    def _read_block(self, reader: _Reader, number: int, begin: int, area: ByteArray) -> None:
        """Read what a block and an area, which begins at ``begin`` in the file, have in common."""
        block_begin, block_end = self._bounds(number)
        start, end = max(block_begin, begin), min(block_end, begin + area.size)
        target = area[start - begin : end - begin]
        if number in self._verified:
            reader.seek(start)
            reader.read_into(target)
        elif (start, end) == (block_begin, block_end):
            self._read_verified(reader, number, target)
        else:
            with self._reading(reader, number) as block:
                target[:] = block[start - block_begin : end - block_begin]

    @contextlib.contextmanager
    def _reading(self, reader: _Reader, number: int) -> Iterator[ByteArray]:
        """Yield a block that matches its checksum, in memory that is used again afterwards."""
        begin, end = self._bounds(number)
        try:
            memory = _SCRATCH.pop()
        except IndexError:
            memory = aligned_empty(BLOCK_BYTES)
        block = memory[: end - begin] if end - begin <= memory.size else aligned_empty(end - begin)
        try:
            self._read_verified(reader, number, block)
            yield block
        finally:
            _SCRATCH.append(memory)

    def _read_verified(self, reader: _Reader, number: int, block: ByteArray) -> None:
        entry = self._tensors
        assert entry is not None
        reader.seek(self._bounds(number)[0])
        reader.read_into(block)
        checksums = (0, *entry.blocks, entry.crc32)  # at the beginning of the first block, and at the end of each
        if zlib.crc32(block, checksums[number]) != checksums[number + 1]:
            raise mismatch(self._directory, entry)
        self._verified.add(number)

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return where a block begins and ends in the file."""
        assert self._tensors is not None
        size = block_size(self._tensors.size)
        return number * size, min((number + 1) * size, self._tensors.size)

    def _tree_text(self) -> bytes:
        check_size(self._directory, self._tree)
        text = self._directory.read_bytes(self._tree.name, self._tree.size)
        if zlib.crc32(text) != self._tree.crc32:
            raise mismatch(self._directory, self._tree)
        return text

    def _tensor_specs(self) -> dict[str, TensorSpec]:
        tensors = self._tensors
        if tensors is None:
            return {}
        check_size(self._directory, tensors)
        where = self._directory.path_of(tensors.name)
        specs = self._directory.read_with(tensors.name, lambda stream: _Reader(stream, where).read_specs(tensors.size))
        return {spec.name: spec for spec in specs}

    def _all_leaves(self) -> dict[str, StoredLeaf]:
        return {} if self._tensors is None else read_leaves(self._directory, self._tensors)


@final
class MemoryPart(PartReader):
    """A part in memory.

    Args:
        get: Returns the payload; called for each read, so that the payload need not be kept between reads.
    """

    where = IN_MEMORY

    def __init__(self, get: Callable[[], ByteArray]) -> None:
        self._get = get

    def read(self, name: str, skip: int, area: ByteArray) -> None:
        begin = self._begin(name, skip, area.size)
        area[:] = self._tensors()[begin : begin + area.size]

    def check(self, name: str, skip: int, num_bytes: int) -> bool:
        self._begin(name, skip, num_bytes)
        return True

    def _tree_text(self) -> bytes:
        return _split_payload(self._get())[1].tobytes()

    def _tensor_specs(self) -> dict[str, TensorSpec]:
        tensors = self._tensors()
        return _specs_in_memory(tensors, IN_MEMORY) if tensors.size else {}

    def _all_leaves(self) -> dict[str, StoredLeaf]:
        tensors = self._tensors()
        return copy_leaves(tensors, IN_MEMORY) if tensors.size else {}

    def _tensors(self) -> ByteArray:
        return _split_payload(self._get())[0]
