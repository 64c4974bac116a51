"""The safetensors file layout: header (names, dtypes, shapes, offsets as JSON), then the bytes of all tensors.

Written by hand rather than with the safetensors library, because that one builds the whole file in memory, or writes to
a local path only: here the tensors are copied once, into a staging buffer that already is the file, and any file system
can be given slices of it. The library reads these files, and files of the library are read here.

The reader trusts nothing: sizes are bounded before anything is allocated, and every offset is checked. Pure; no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raysgd.checkpoint.strict_json import parse_json
from raysgd.errors import CheckpointCorruptError, CheckpointError

# Bytes of one element. F4 and the 6-bit types share bytes between elements and are not used.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_ALIGNMENT = 64  # of the data's start in the file: tensors are views on the read buffer, and vector loads like it
_METADATA = "__metadata__"
_MAX_NDIM = 64  # of torch and of NumPy
_MAX_LENGTH = 1 << 62


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file.

    Attributes:
        name: Unique in the file.
        dtype: By its safetensors name.
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
    """The bytes before the data, for tensors that follow each other without gaps.

    Args:
        tensors: (name, dtype, shape, bytes) in the order of their data.
        metadata: Free text for other readers.
    """
    fields = [f"{json.dumps(_METADATA)}:{json.dumps(metadata)}"]
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        end = offset + num_bytes
        value = f'{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[{offset},{end}]}}'
        fields.append(f"{json.dumps(name)}:{value}")  # by hand: an order faster than json.dumps of nested dicts
        offset = end
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the state has too many tensors for one file: its header takes {len(text):,} bytes.")
    return struct.pack("<Q", len(text)) + text


def decode_header(file: memoryview, where: str) -> dict[str, TensorSpec]:
    """The tensors of a file that is wholly in memory.

    Args:
        file: All bytes of the file.
        where: The file's path, for messages.

    Raises:
        CheckpointCorruptError: The header does not fit itself or the file.
    """
    data_start = 8 + _header_length(file, where)
    header = parse_json(file[8:data_start].tobytes(), where)
    if not isinstance(header, dict):
        raise CheckpointCorruptError(f"{where}: the header is no JSON object")
    header.pop(_METADATA, None)
    specs = [_spec(name, value, data_start, len(file), where) for name, value in header.items()]
    _check_overlap(specs, where)
    return {spec.name: spec for spec in specs}


def _header_length(file: memoryview, where: str) -> int:
    if len(file) < 8:
        raise CheckpointCorruptError(f"{where} has {len(file)} bytes, too few for a safetensors file")
    (length,) = struct.unpack("<Q", file[:8])
    if length > MAX_HEADER_BYTES or 8 + length > len(file):
        raise CheckpointCorruptError(f"{where}: a header of {length:,} bytes does not fit a file of {len(file):,}")
    return int(length)


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


def _check_overlap(specs: list[TensorSpec], where: str) -> None:
    """Two tensors on the same bytes would change together."""
    previous: TensorSpec | None = None
    for spec in sorted((s for s in specs if s.begin < s.end), key=lambda s: s.begin):
        if previous is not None and spec.begin < previous.end:
            raise CheckpointCorruptError(f"{where}: tensors {previous.name!r} and {spec.name!r} overlap")
        previous = spec
