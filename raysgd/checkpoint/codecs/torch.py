"""Encodes torch tensors, parameters, generators, dtypes, devices and sizes.

What loading returns:
    - Tensors are contiguous, on the CPU, and have the same dtype, shape and values. Parameters stay parameters.
    - Leaf tensors keep ``requires_grad``. Gradients, hooks and names of dims are not kept.
    - A tensor object at two places is one object again. Two tensors over exactly the same memory (same address, dtype,
      shape and strides, as ``state_dict()`` gives for tied weights) share memory again. Tensors that overlap only
      partly are stored separately.
    - A DTensor is saved by every rank as the shards that it holds, and loaded as a `raysgd.SavedArray`, or in a driver as the
      whole tensor. `raysgd.torch.restore` makes DTensors again.

This module is imported only where torch is in use, and imports torch on the first value.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raysgd.checkpoint.codecs.leaves import ByteArray, Json, Leaf
from raysgd.checkpoint.codecs.shards import ShardIndex
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# torch dtype -> (safetensors dtype, number of those per element). Types that the format lacks are stored as bytes or pairs.
_DTYPES = {
    "bool": ("BOOL", 1),
    **{
        f"{kind}{bits}": (f"{letter}{bits}", 1)
        for kind, letter in (("int", "I"), ("float", "F"))
        for bits in (16, 32, 64)
    },
    **{f"uint{bits}": (f"U{bits}", 1) for bits in (8, 16, 32, 64)},
    "int8": ("I8", 1),
    "bfloat16": ("BF16", 1),
    "complex32": ("F16", 2),
    "complex64": ("C64", 1),
    "complex128": ("F64", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float4_e2m1fn_x2": ("U8", 1),
}
_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}
_DEVICE = re.compile(r"[a-z]{1,32}(:[0-9]{1,4})?")


@functools.cache
def torch() -> Any:
    """Import torch; say what to install if it is missing."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError("this checkpoint holds torch tensors: install raysgd[torch] to load it") from error


@dataclass(frozen=True)
class AbsentTensor:
    """A tensor that other ranks save, in the state of a rank that holds nothing of it.

    Attributes:
        dtype: A torch dtype.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class LocalShards:
    """The elements of a DTensor that a rank holds, without the mesh, which ends with its process group.

    Attributes:
        local: The local tensor.
        shape: Of the whole tensor.
        places: Where its elements lie in the whole tensor, as `local_shards` has it.
    """

    local: Any
    shape: tuple[int, ...]
    places: tuple[ShardIndex, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> LocalShards:
        return cls(tensor._local_tensor.detach(), tuple(tensor.shape), tuple(local_shards(tensor)))

    @property
    def dtype(self) -> Any:
        return self.local.dtype


def _encode_local_shards(encoder: Any, shards: LocalShards) -> Json:
    places = [[*map(list, index)] for index in shards.places]
    return ["torch.local_shards", list(shards.shape), places, encoder.encode(shards.local)]


def _decode_local_shards(decoder: Any, node: Json) -> LocalShards:
    places = tuple(ShardIndex(tuple(begin), tuple(end)) for begin, end in node[2])
    return LocalShards(decoder.decode(node[3]), tuple(node[1]), places)


def find_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """Return the encoder of a torch value, or None."""
    if isinstance(value, LocalShards):
        return _encode_local_shards
    if isinstance(value, AbsentTensor):
        return lambda encoder, absent: encoder.shards.add(
            encoder.path, f"torch.{_name(absent.dtype)}", absent.shape, {}
        )
    for name, encoder in _KINDS:
        if isinstance(value, getattr(torch(), name)):
            return encoder
    return None


def _encode_tensor(encoder: Any, tensor: Any) -> Json:
    if is_dtensor(tensor):
        return _encode_dtensor(encoder, tensor)
    reason = _why_not_plain(tensor)
    if reason is not None:
        return encoder.unsafe(tensor, reason)
    layout = _name(tensor.layout)
    if layout == "strided":
        return _encode_dense(encoder, tensor)
    if layout == "sparse_coo":
        parts = [tensor._indices(), tensor._values()]
        return _sparse_node(encoder, tensor, layout, parts, tensor.is_coalesced())
    parts = [getattr(tensor, name)() for name in _COMPRESSED[layout]] + [tensor.values()]
    return _sparse_node(encoder, tensor, layout, parts, True)


def _why_not_plain(tensor: Any) -> str | None:
    kind = type(tensor)
    if "Uninitialized" in kind.__name__:
        return f"is an {kind.__name__}, which has no values yet: run the model once before saving"
    if kind not in (torch().Tensor, torch().nn.Parameter):
        return f"is a {kind.__name__}, a subclass of Tensor: save a plain tensor"
    if tensor.is_quantized or tensor.is_nested or tensor.is_mkldnn or tensor.device.type == "meta":
        return f"is a quantized, nested, mkldnn or meta tensor ({_describe(tensor)}): save a dense copy of it"
    return None


def _encode_dense(encoder: Any, tensor: Any) -> Json:
    shape = list(tensor.shape)
    reference = encoder.add_leaf(_leaf(encoder, encoder.path, tensor))
    dtype = _name(tensor.dtype)
    kind = "parameter" if isinstance(tensor, torch().nn.Parameter) else "tensor"
    return [f"torch.{kind}", reference, dtype, shape, _keeps_grad(tensor)]


def _leaf(encoder: Any, path: Sequence[Any], tensor: Any) -> Leaf:
    dtype = _name(tensor.dtype)
    if dtype not in _DTYPES:
        raise CheckpointError(f"{encoder.where()} has dtype {dtype}, which a checkpoint cannot hold; convert it")
    stored, lanes = _DTYPES[dtype]
    shape = tuple(tensor.shape) if lanes == 1 else (*tensor.shape, lanes)
    source = tensor.detach()
    item_bytes = source.element_size()
    num_bytes = source.numel() * item_bytes
    key = _memory(source) if num_bytes else None
    device = source.device if source.device.type != "cpu" else None
    return Leaf(tuple(path), stored, shape, num_bytes, item_bytes, source, _fill, key, device)


def _fill(source: Any, area: ByteArray) -> None:
    if not area.size:
        return
    if source.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
        flat = source.reshape(-1)
        if flat.stride(0) == 1:  # one element may have any stride
            np.copyto(area, flat.view(torch().uint8).numpy())  # a plain memcpy; torch's copy_ is slower
            return
    if source.element_size() == 1:  # copy_ lacks some 8-bit types
        source = source.view(torch().uint8)
    if source.device.type != "cpu":  # torch would conjugate or negate here at once, before the copy has arrived
        source = source.resolve_conj().resolve_neg()
    torch().frombuffer(area, dtype=source.dtype).view(source.shape).copy_(source, non_blocking=True)


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that view the same memory in the same way."""
    lazy = (tensor.is_conj(), tensor.is_neg())
    return ("torch", tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *lazy)


def _decode_dense(decoder: Any, node: Json) -> Any:
    _, reference, dtype, shape, requires_grad = node
    stored, lanes = _DTYPES[dtype]
    leaf = decoder.get_leaf(reference)
    expected = tuple(shape) if lanes == 1 else (*shape, lanes)
    if leaf.dtype != stored or leaf.shape != expected:
        raise ValueError(f"{leaf.dtype} of shape {leaf.shape} does not store {dtype} of shape {shape}")
    tensor = _view(leaf.data, getattr(torch(), dtype), shape)
    if node[0] == "torch.parameter":
        return torch().nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _view(data: ByteArray, dtype: Any, shape: list[int]) -> Any:
    if not math.prod(shape):
        return torch().empty(shape, dtype=dtype)
    return torch().from_numpy(data).view(dtype).view(shape)


# -- DTensors --------------------------------------------------------------------------------------


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a `torch.distributed.tensor.DTensor`; does not import that module, which takes a second (sympy)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _encode_dtensor(encoder: Any, tensor: Any) -> Json:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{encoder.where()} is a DTensor whose ranks hold terms of a sum ({tensor.placements}): call .redistribute(...) "
            "first, so that each rank holds values"
        )
    local = tensor.detach()._local_tensor
    if encoder.shards is None:
        if tensor.device_mesh.size() > 1:
            raise CheckpointError(
                f"{encoder.where()} is distributed over the ranks of a mesh: call save_checkpoint(..., all_ranks=True) on all "
                "ranks, so that each saves the shards that it holds"
            )
        return _encode_dense(encoder, local)
    shards = local_shards(tensor) if _writes(tensor) else {}
    path = [*encoder.path, "shard"]
    names = {index: encoder.add_leaf(_leaf(encoder, path, local[where])) for index, where in shards.items()}
    return encoder.shards.add(encoder.path, f"torch.{_name(tensor.dtype)}", tensor.shape, names)


def _writes(tensor: Any) -> bool:
    """Whether this rank saves its shards: of several ranks that hold the same ones, only the first does.

    A tensor on a part of a mesh, such as its axis of tensor parallelism, is held once for each place on the other axes; but
    for an axis "pp", whose ranks hold different layers.
    """
    mesh = tensor.device_mesh
    root = mesh._get_root_mesh()
    names = root.mesh_dim_names or ()
    own = dict(zip(mesh.mesh_dim_names or (), tensor.placements, strict=False))
    if not names or not set(own) <= set(names):  # a mesh of its own, such as one made by flattening two axes
        root, own = mesh, dict(enumerate(tensor.placements))
        names = tuple(own)
    coordinate = root.get_coordinate()
    if coordinate is None:
        return False
    held_once = (not own[name].is_replicate() if name in own else name == "pp" for name in names)
    return all(place == 0 or is_once for place, is_once in zip(coordinate, held_once, strict=True))


def local_shards(tensor: Any) -> dict[ShardIndex, tuple[slice, ...]]:
    """Return which elements of a DTensor this rank holds: slices of its local tensor, by their place in the whole tensor.

    There are several only if a rank's elements are not one block, as under tensor parallelism below FSDP when the sizes do
    not divide.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return {}
    runs = []
    for dim, extent in enumerate(tensor.shape):
        indices = torch().arange(extent).reshape([extent if axis == dim else 1 for axis in range(tensor.ndim)])
        for axis, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and placement.dim == dim:
                chunks, _ = placement._split_tensor(indices, mesh.size(axis), with_padding=False, contiguous=False)
                indices = chunks[coordinate[axis]]
        runs.append(_runs(indices.flatten().numpy()))
    shards = {}
    for spans in itertools.product(*runs):
        index = ShardIndex(tuple(begin for begin, _, _ in spans), tuple(end for _, end, _ in spans))
        if index.size:
            shards[index] = tuple(slice(at, at + end - begin) for begin, end, at in spans)
    return shards


def _runs(indices: Any) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive numbers: the first, the one after the last, and the place of the first in ``indices``."""
    cuts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[a]), int(indices[b - 1]) + 1, a) for a, b in itertools.pairwise(cuts) if a < b]


def dtype_from_json(description: Any) -> Any:
    """Return the dtype that the table of shards names.

    Raises:
        ValueError: It names none.
    """
    dtype = getattr(torch(), str(description).removeprefix("torch."), None)
    if not isinstance(dtype, torch().dtype):
        raise ValueError(f"{description!r} is not a dtype of torch")
    return dtype


def stored_dtype(dtype: Any) -> tuple[str, int]:
    """Return the safetensors dtype that stores a dtype of torch, and how many of those one element takes.

    Raises:
        CheckpointError: None does.
    """
    name = _name(dtype)
    if name not in _DTYPES:
        raise CheckpointError(f"dtype {name} cannot be written to a file; convert the tensor.")
    return _DTYPES[name]


def tensor_from_bytes(data: ByteArray, dtype: Any, shape: Sequence[int]) -> Any:
    """Return a tensor over these bytes."""
    return _view(data, dtype, list(shape))


# -- other values ----------------------------------------------------------------------------------


def _keeps_grad(tensor: Any) -> bool:
    """Only a leaf of the autograd graph can be made with ``requires_grad``."""
    return bool(tensor.requires_grad and tensor.is_leaf)


def _sparse_node(encoder: Any, tensor: Any, layout: str, parts: list[Any], coalesced: bool) -> Json:
    nodes = [encoder.encode(part.detach()) for part in parts]
    return ["torch.sparse", layout, list(tensor.shape), coalesced, _keeps_grad(tensor), *nodes]


def _decode_sparse(decoder: Any, node: Json) -> Any:
    _, layout, shape, coalesced, requires_grad, *nodes = node
    parts = [decoder.decode(part) for part in nodes]
    # Check invariants: wrong indices from a damaged file would read out of bounds.
    if layout == "sparse_coo":
        tensor = torch().sparse_coo_tensor(*parts, shape, is_coalesced=coalesced, check_invariants=True)
    elif layout in _COMPRESSED:
        kind = getattr(torch(), layout)
        tensor = torch().sparse_compressed_tensor(*parts, shape, layout=kind, check_invariants=True)
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return tensor.requires_grad_(requires_grad)


def _decode_generator(decoder: Any, node: Json) -> Any:
    state = decoder.decode(node[2])
    try:
        generator = torch().Generator(device=_decode_device(decoder, node))
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        text = f"{decoder.where()} is a generator of {node[1]}, which this process lacks: its state is loaded as a tensor ({why})"
        warnings.warn(text, stacklevel=2)
        return state
    generator.set_state(state)
    return generator


def _decode_device(decoder: Any, node: Json) -> Any:
    if not _DEVICE.fullmatch(node[1]):
        raise ValueError(f"{node[1]!r} is not a device")
    return torch().device(node[1])


def _decode_dtype(decoder: Any, node: Json) -> Any:
    dtype = getattr(torch(), node[1]) if re.fullmatch("[a-z0-9_]+", node[1]) else None
    if not isinstance(dtype, torch().dtype):
        raise ValueError(f"{node[1]!r} is not a dtype")
    return dtype


def synchronize(devices: Iterable[Any]) -> None:
    """Wait for the copies that `_leaf` started on the current stream of each device."""
    for device in devices:
        library: Any = getattr(torch(), device.type, None)
        if hasattr(library, "current_stream"):
            library.current_stream(device).synchronize()
        elif hasattr(library, "synchronize"):
            library.synchronize()


@functools.cache
def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _describe(tensor: Any) -> str:
    return f"{_name(tensor.dtype)}, {_name(tensor.layout)}, on {tensor.device}"


_KINDS: tuple[tuple[str, Callable[[Any, Any], Json]], ...] = (
    ("Tensor", _encode_tensor),
    ("Size", lambda e, v: ["torch.size", *map(int, v)]),
    ("dtype", lambda e, v: ["torch.dtype", _name(v)]),
    ("device", lambda e, v: ["torch.device", str(v)]),
    ("Generator", lambda e, v: ["torch.generator", str(v.device), e.encode(v.get_state())]),
)

DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "torch.tensor": _decode_dense,
    "torch.parameter": _decode_dense,
    "torch.sparse": _decode_sparse,
    "torch.local_shards": _decode_local_shards,
    "torch.size": lambda d, n: torch().Size(n[1:]),
    "torch.dtype": _decode_dtype,
    "torch.device": _decode_device,
    "torch.generator": _decode_generator,
}
