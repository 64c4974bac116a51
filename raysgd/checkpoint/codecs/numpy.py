"""Encodes NumPy arrays, scalars and random generators, and arrays of libraries that convert to NumPy (JAX, TensorFlow).

Arrays are loaded as plain, writable, C-ordered ndarrays. This module is imported only where NumPy is in use.
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.leaves import ByteArray, Json, Leaf
from raysgd.errors import CheckpointError

# dtype name -> safetensors name of the same dtype.
_SAME = {
    "bool": "BOOL",
    **{
        f"{kind}{bits}": f"{letter}{bits}" for kind, letter in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
}
# dtypes that the package ml_dtypes adds to NumPy for JAX. Those that safetensors lacks are stored as one byte (U8) each.
ML_DTYPES = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"), "U8"),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"), "U8"),
    **dict.fromkeys(("int1", "int2", "int4", "uint1", "uint2", "uint4"), "U8"),
}
_BIT_GENERATORS: dict[str, Any] = {
    name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
}
_MAX_POOL = 1024  # NumPy's own has 4 words
_ARRAY_LIBRARIES = ("jax", "jaxlib", "tensorflow")


def find_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """Return the encoder of a NumPy value or of an array of another library, or None."""
    if isinstance(value, np.ndarray):
        return _encode_array
    if isinstance(value, np.generic):
        return _encode_scalar
    for kind, encoder in _OTHERS:
        if isinstance(value, kind):
            return encoder
    if type(value).__module__.partition(".")[0] in _ARRAY_LIBRARIES and hasattr(value, "__array__"):
        return encode_array_like
    return None


def _encode_array(encoder: Any, array: Any) -> Json:
    if type(array) not in (np.ndarray, np.memmap):
        return encoder.unsafe(
            array, f"is {with_article(type(array).__name__)}, not a plain array: save np.asarray(...) of it"
        )
    description = dtype_to_json(array.dtype)
    if description is None:
        return encoder.unsafe(
            array, f"is an array of dtype {array.dtype}, which only pickle can hold: save plain numbers"
        )
    address = array.__array_interface__["data"][0]
    key = ("numpy", address, array.dtype.str, array.dtype.name, array.shape, array.strides) if array.nbytes else None
    return ["np.array", encoder.add_leaf(leaf_of(encoder.path, array, key)), description, list(array.shape)]


def leaf_of(path: Sequence[Any], array: Any, key: Hashable = None) -> Leaf:
    """Make a leaf of an array, or of what converts to one. The array is copied when the leaf is filled.

    `dtype_to_json` must know its dtype.
    """
    stored = _stored_dtype(array.dtype)
    num_bytes = math.prod(array.shape) * array.dtype.itemsize
    shape = array.shape if stored is not None else (num_bytes,)
    return Leaf(tuple(path), stored or "U8", shape, num_bytes, array.dtype.alignment, array, _fill, key)


def dtype_to_json(dtype: Any) -> Json:
    """Encode a dtype for `dtype_from_json`; None for one that only pickle can hold."""
    return dtype.name if _stored_dtype(dtype) is not None else _describe(dtype)


def _fill(array: Any, area: ByteArray) -> None:
    if array.nbytes:
        np.copyto(np.ndarray(array.shape, array.dtype, area), np.asarray(array), casting="no")


def _decode_array(decoder: Any, node: Json) -> Any:
    _, reference, description, shape = node
    dtype = dtype_from_json(description)
    leaf = decoder.get_leaf(reference)
    expected = _stored_dtype(dtype) or "U8"
    if leaf.dtype != expected or math.prod(shape) * dtype.itemsize != leaf.data.nbytes:
        raise ValueError(f"{leaf.data.nbytes} bytes of {leaf.dtype} do not fill an array of shape {shape} and {dtype}")
    if not leaf.data.nbytes:
        return np.zeros(shape, dtype)
    return np.ndarray(tuple(shape), dtype, leaf.data)


def _encode_scalar(encoder: Any, value: Any) -> Json:
    if type(value) is np.str_:  # raw bytes would lose trailing zeros
        return ["np.str", encoder.encode(str.__str__(value))]
    if type(value) is np.bytes_:
        return ["np.bytes", encoder.encode(bytes(value))]
    name = dtype_to_json(value.dtype)
    if name is None:
        return encoder.unsafe(value, f"is a NumPy scalar of dtype {value.dtype}, which only pickle can hold")
    return ["np.scalar", name, base64.b64encode(np.asarray(value).tobytes()).decode()]


def _decode_scalar(decoder: Any, node: Json) -> Any:
    data = bytearray(base64.b64decode(node[2], validate=True))
    dtype = dtype_from_json(node[1])
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not a scalar of {dtype}")
    return np.ndarray((), dtype, data)[()]


def encode_array_like(encoder: Any, value: Any) -> Json:
    """Convert a value to a NumPy array and encode that."""
    try:
        array = np.asarray(value)
    except Exception as error:
        raise CheckpointError(f"{encoder.where()} cannot be converted to a NumPy array: {error}") from error
    return _encode_array(encoder, array)


def _encode_dtype(encoder: Any, value: Any) -> Json:
    name = dtype_to_json(value)
    if name is None:
        return encoder.unsafe(value, f"is the dtype {value}, which only pickle can hold")
    return ["np.dtype", name]


def _encode_bit_generator(encoder: Any, value: Any) -> Json:
    if type(value) not in _BIT_GENERATORS.values():
        return encoder.unsafe(
            value, f"is {with_article(type(value).__name__)}, which only pickle can hold: save its .state"
        )
    seed = getattr(value, "seed_seq", None)
    seed_state = seed.state if type(seed) is np.random.SeedSequence else None  # spawn() continues from it
    return ["np.bits", type(value).__name__, encoder.encode(value.state), encoder.encode(seed_state)]


def _decode_bit_generator(decoder: Any, node: Json) -> Any:
    _, name, state_node, seed_node = node
    state, seed = _checked_positions(decoder.decode(state_node)), decoder.decode(seed_node)
    if seed and seed["pool_size"] > _MAX_POOL:
        raise ValueError(f"a seed pool of {seed['pool_size']} words")
    generator = _BIT_GENERATORS[name](np.random.SeedSequence(**seed) if seed else 0)
    generator.state = state
    return generator


def _checked_positions(state: dict[str, Any]) -> dict[str, Any]:
    """Check positions in a generator's state: NumPy does not, and reads out of bounds where they are wrong."""
    inner = state["state"]
    for place, name, end in (
        (inner, "pos", 624),
        (state, "buffer_pos", 4),
        (state, "has_uint32", 1),
        (state, "has_gauss", 1),
    ):
        if name in place and not 0 <= int(place[name]) <= end:
            raise ValueError(f"{name}={place[name]} is not a position in the state of a generator")
    return state


def _encode_random_state(encoder: Any, value: Any) -> Json:
    state = value.get_state(legacy=False)
    if type(value) is not np.random.RandomState or state["bit_generator"] != "MT19937":
        return encoder.unsafe(
            value, f"is {with_article(type(value).__name__)}, which only pickle can hold: save its get_state()"
        )
    return ["np.random_state", encoder.encode(state)]


def _decode_random_state(decoder: Any, node: Json) -> Any:
    state = _checked_positions(decoder.decode(node[1]))
    random_state = np.random.RandomState(0)
    random_state.set_state(state)
    return random_state


def _stored_dtype(dtype: Any) -> str | None:
    """Return the safetensors name of the same dtype, or None."""
    if dtype.type.__module__ == "ml_dtypes" or type(dtype).__module__ == "ml_dtypes":
        return ML_DTYPES.get(dtype.name)
    return _SAME.get(dtype.name) if dtype.isnative and dtype.fields is None and dtype.kind in "biufc" else None


def _describe(dtype: Any) -> Json:
    """Describe a dtype by JSON from which `dtype_from_json` makes exactly this dtype; None if that is not possible."""
    if dtype.hasobject or not dtype.itemsize or dtype.type.__module__ == "ml_dtypes":
        return None
    try:
        description = _plain(np.lib.format.dtype_to_descr(dtype))
        return description if dtype_from_json(description) == dtype else None
    except (TypeError, ValueError):
        return None


def _plain(description: Any) -> Json:
    return [_plain(part) for part in description] if isinstance(description, (list, tuple)) else description


def dtype_from_json(description: Json) -> Any:
    """Make a dtype of its JSON. NumPy only parses text and lists here; object dtypes are refused."""
    if isinstance(description, str) and description in ML_DTYPES:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), description))
    dtype = np.lib.format.descr_to_dtype(_fields(description))
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError("an array of Python objects, or of zero-sized items")
    return dtype


def _fields(description: Json) -> Any:
    """Convert lists back to the tuples by which NumPy recognises fields."""
    if not isinstance(description, list):
        return description
    fields = []
    for name, kind, *shape in description:
        label = tuple(name) if isinstance(name, list) else name
        fields.append((label, _fields(kind), *(tuple(extent) for extent in shape)))
    return fields


_OTHERS: tuple[tuple[Any, Callable[[Any, Any], Json]], ...] = (
    (np.dtype, _encode_dtype),
    (np.random.Generator, lambda e, v: ["np.generator", e.encode(v.bit_generator)]),
    (np.random.BitGenerator, _encode_bit_generator),
    (np.random.RandomState, _encode_random_state),
)

DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "np.array": _decode_array,
    "np.scalar": _decode_scalar,
    "np.str": lambda d, n: np.str_(d.decode(n[1])),
    "np.bytes": lambda d, n: np.bytes_(d.decode(n[1])),
    "np.dtype": lambda d, n: dtype_from_json(n[1]),
    "np.bits": _decode_bit_generator,
    "np.random_state": _decode_random_state,
    "np.generator": lambda d, n: np.random.Generator(d.decode(n[1])),
}
if sys.byteorder != "little":  # safetensors files are little-endian, and everything here copies native bytes
    raise ImportError("raysgd checkpoints need a little-endian machine")
