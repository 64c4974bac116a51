"""One rank's part of a checkpoint, of which some of the tensors are read, or stretches of them: from storage or from memory.

What reads a part as a whole is `raysgd.checkpoint.parts` and `raysgd.checkpoint.payload`. Runs in workers and drivers.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from raysgd.checkpoint.leaves import ByteArray, StoredLeaf
from raysgd.checkpoint.names import FileEntry
from raysgd.checkpoint.parts import parse_tree, read_part, read_tree, split_entries
from raysgd.checkpoint.payload import WHERE, load_payload, split_payload
from raysgd.checkpoint.shards import KIND, Shards, read_table
from raysgd.checkpoint.storage import Storage
from raysgd.checkpoint.tensor_files import Leaves, aligned_empty, read_specs, read_stretch, specs_in
from raysgd.checkpoint.tensors import TensorSpec
from raysgd.checkpoint.verify import verify_entries
from raysgd.errors import CheckpointCorruptError


class PartSource(abc.ABC):
    """A part. Nothing is read before it is asked for. Thread-safe.

    Attributes:
        where: What to call it in messages.
    """

    where: str

    @abc.abstractmethod
    def load(self, *, trusted: bool) -> Any:
        """The state of a part without pieces."""

    @abc.abstractmethod
    def read(self, name: str, skip: int, area: ByteArray) -> None:
        """Fill ``area`` with the bytes of a tensor from ``skip`` on.

        Raises:
            CheckpointCorruptError: There are none.
        """

    @abc.abstractmethod
    def _read_tree(self) -> bytes: ...

    @abc.abstractmethod
    def _read_specs(self) -> dict[str, TensorSpec]: ...

    @functools.cached_property
    def state(self) -> Any:
        """The tree."""
        return self._document["state"]

    @functools.cached_property
    def shards(self) -> dict[str, Shards]:
        """Its table of shards; empty for a part without pieces."""
        return read_table(self._document.get(KIND, {}), self.where)

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Its tensors by name."""
        return self._read_specs()

    @property
    def own_names(self) -> list[str]:
        """The tensors that are no pieces."""
        pieces = {name for shards in self.shards.values() for _, name in shards.pieces}
        return [name for name in self.specs if name not in pieces]

    def leaves(self, names: Iterable[str]) -> Leaves:
        """Some of its tensors, each in memory of its own."""
        return Leaves((name, self._leaf(self.specs[name])) for name in names)

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        return parse_tree(self._read_tree(), self.where)

    def _begin(self, name: str, skip: int, num_bytes: int) -> int:
        """Where a stretch of a tensor begins in the file."""
        spec = self.specs.get(name)
        if spec is None or skip + num_bytes > spec.end - spec.begin:
            raise CheckpointCorruptError(f"{self.where} names the tensor {name!r}, which is missing or too small")
        return spec.begin + skip

    def _leaf(self, spec: TensorSpec) -> StoredLeaf:
        data = aligned_empty(spec.end - spec.begin)
        self.read(spec.name, 0, data)
        return StoredLeaf(spec.dtype, spec.shape, data)


@final
class StoredPart(PartSource):
    """A part on storage. Its tensors are compared with their checksum, all at once, before the first of them is used.

    Args:
        directory: Of the checkpoint.
        entries: The part's files.
        verify: Compare checksums; sizes always are.
    """

    def __init__(self, directory: Storage, entries: Sequence[FileEntry], *, verify: bool) -> None:
        self._directory = directory
        self._entries = entries
        self._verify = verify
        self._tree, self._tensors = split_entries(directory, entries)
        self._lock = threading.Lock()
        self._is_verified = not verify
        self.where = directory.path_of(self._tree.name)

    def load(self, *, trusted: bool) -> Any:
        return read_part(self._directory, self._entries, trusted=trusted, verify=self._verify)

    def read(self, name: str, skip: int, area: ByteArray) -> None:
        begin = self._begin(name, skip, area.size)
        assert self._tensors is not None  # as it has a tensor
        with self._lock:
            if not self._is_verified:
                verify_entries(self._directory, [self._tensors], checksums=True)
                self._is_verified = True
        read_stretch(self._directory, self._tensors.name, begin, area)

    def _read_tree(self) -> bytes:
        return read_tree(self._directory, self._tree, verify=self._verify)

    def _read_specs(self) -> dict[str, TensorSpec]:
        return {} if self._tensors is None else read_specs(self._directory, self._tensors)


@final
class HeldPart(PartSource):
    """A part in memory.

    Args:
        get: Gives the payload, an array of bytes; called each time, so that it need not stay.
    """

    where = WHERE

    def __init__(self, get: Callable[[], ByteArray]) -> None:
        self._get = get

    def load(self, *, trusted: bool) -> Any:
        return load_payload(self._get(), trusted=trusted)

    def read(self, name: str, skip: int, area: ByteArray) -> None:
        begin = self._begin(name, skip, area.size)
        tensors, _ = split_payload(self._get())
        area[:] = tensors[begin : begin + area.size]

    def _read_tree(self) -> bytes:
        return bytes(split_payload(self._get())[1].tobytes())

    def _read_specs(self) -> dict[str, TensorSpec]:
        tensors, _ = split_payload(self._get())
        return specs_in(tensors, WHERE) if tensors.size else {}
