"""The safetensors file layout: header (names, dtypes, shapes, offsets as JSON), then the bytes of all tensors.

The safetensors library is not used: it builds the whole file in memory, or writes to a local path only. Here the tensors
are copied once, into a staging buffer that already is the file, and slices of it go to any file system. The library reads
these files, and this module reads files of the library.

The reader trusts nothing: it bounds sizes before anything is allocated, and checks every offset. Pure; no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.codecs.leaves import ITEM_BYTES
from raysgd.checkpoint.format.json import parse_json
from raysgd.errors import CheckpointCorruptError, CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LENGTH_BYTES = 8  # a file begins with the header's length
_ALIGNMENT = 64  # of the first data byte, so that elements are aligned in the staging buffer and in a mapped file
_METADATA = "__metadata__"
_MAX_NDIM = 64  # the limit of torch and NumPy
_MAX_LENGTH = 1 << 62


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file.

    Attributes:
        name: Unique in the file.
        dtype: Its safetensors name.
        shape: In elements.
        begin: First byte, counted from the start of the file.
        end: One past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """Make the bytes before the data, for tensors that follow each other without gaps.

    Args:
        tensors: (name, dtype, shape, bytes) in the order of their data.
        metadata: Free text for other readers.
    """
    fields = [f"{json.dumps(_METADATA)}:{json.dumps(metadata)}"]
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        end = offset + num_bytes
        value = f'{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[{offset},{end}]}}'
        fields.append(f"{json.dumps(name)}:{value}")  # ten times faster than json.dumps of nested dicts
        offset = end
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the state has too many tensors for one file: its header takes {len(text):,} bytes. Save fewer, larger ones."
        )
    return struct.pack("<Q", len(text)) + text


def header_length(file: bytes | memoryview, file_bytes: int, where: str) -> int:
    """Return how many header bytes follow the first `LENGTH_BYTES`.

    Raises:
        CheckpointCorruptError: There are more than the file has, or than a header may have.
    """
    if file_bytes < LENGTH_BYTES:
        raise CheckpointCorruptError(f"{where} has {file_bytes} bytes, too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", file)
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
        raise CheckpointCorruptError(f"{where}: a header of {length:,} bytes does not fit a file of {file_bytes:,}")
    return int(length)


def decode_header(header: bytes, file_bytes: int, where: str) -> list[TensorSpec]:
    """Parse a header: the tensors of a file, in the order of their data.

    Args:
        header: All bytes before the data.
        file_bytes: Size of the whole file.
        where: The file's path, for messages.

    Raises:
        CheckpointCorruptError: The header contradicts itself or the size of the file.
    """
    document = parse_json(header[LENGTH_BYTES:], where)
    if not isinstance(document, dict):
        raise CheckpointCorruptError(f"{where}: the header is not a JSON object")
    document.pop(_METADATA, None)
    specs = [_spec(name, value, len(header), file_bytes, where) for name, value in document.items()]
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    _check_order(specs, len(header), file_bytes, where)
    return specs


def _spec(name: str, value: Any, data_start: int, file_bytes: int, where: str) -> TensorSpec:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointCorruptError(f"{where}: tensor {name!r} lacks a dtype, shape or data_offsets") from error
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointCorruptError(f"{where}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM or not all(map(_is_length, [*shape, begin, end])):
        raise CheckpointCorruptError(f"{where}: tensor {name!r} has a bad shape or bad offsets")
    if not begin <= end <= file_bytes - data_start:
        raise CheckpointCorruptError(f"{where}: tensor {name!r} lies at {begin}..{end}, outside the file's data")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:  # Python's ints do not overflow
        raise CheckpointCorruptError(
            f"{where}: tensor {name!r} of shape {shape} and {dtype} does not fill {end - begin} bytes"
        )
    return TensorSpec(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_length(number: Any) -> bool:
    return type(number) is int and 0 <= number < _MAX_LENGTH


def _check_order(specs: list[TensorSpec], data_start: int, file_bytes: int, where: str) -> None:
    """Refuse overlaps, where two tensors would change together, and gaps: the format allows neither."""
    end = data_start
    for spec in specs:
        if spec.begin != end:
            raise CheckpointCorruptError(f"{where}: tensor {spec.name!r} overlaps another one, or leaves a gap")
        end = spec.end
    if end != file_bytes:
        raise CheckpointCorruptError(f"{where}: {file_bytes - end:,} bytes follow the last tensor")
