"""`StoredArray`: an array in a file of another library, of which each process reads what its devices need. Any process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np

from raysgd._util.imports import import_optional
from raysgd.errors import CheckpointError, CheckpointNotFoundError

#: The files that ``save_pretrained`` of transformers writes: the only one, or the table of several.
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@final
@dataclass(frozen=True, eq=False)
class StoredArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a file, which may be a parameter: a worker reads the slices that its devices need.

    The file must be at the same path for all workers. NumPy and JAX compute with it as with an array; then all of it is read.

    Attributes:
        shape: Of the whole array.
        dtype: A NumPy dtype, to which the values are converted when they are read.
        read_stored: Reads slices, one for each dimension that the file has.
        is_transposed: Whether the dimensions are those of the file in reverse order.
    """

    shape: tuple[int, ...]
    dtype: Any
    read_stored: Callable[[tuple[slice, ...]], Any]
    is_transposed: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> StoredArray:  # noqa: N802
        """The transposed array, such as the kernel of a layer of flax for a weight of torch. Nothing is read."""
        return replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)

    def astype(self, dtype: Any, copy: bool = True) -> StoredArray:
        """Return the array with another type. Nothing is read."""
        return replace(self, dtype=np.dtype(dtype))

    def read(self) -> Any:
        """Read all of it."""
        return self[()]

    def __getitem__(self, key: Any) -> Any:
        """Read the elements of slices without steps, one for each of the first dimensions."""
        given = key if isinstance(key, tuple) else (key,)
        is_known = len(given) <= self.ndim and all(isinstance(each, slice) and each.step in (None, 1) for each in given)
        if not is_known:
            return self.read()[key]
        slices = [*given, *[slice(None)] * (self.ndim - len(given))]
        bounds = [slice(*each.indices(size)) for each, size in zip(slices, self.shape, strict=True)]
        found = np.asarray(self.read_stored(tuple(bounds[::-1] if self.is_transposed else bounds)))
        return (found.T if self.is_transposed else found).astype(self.dtype, copy=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.read(), dtype)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        read = [each.read() if isinstance(each, StoredArray) else each for each in inputs]
        return getattr(function, method)(*read, **settings)

    def __jax_array__(self) -> Any:
        import jax

        return jax.numpy.asarray(self.read())


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Open the arrays of a safetensors file, or of a folder that ``save_pretrained`` of transformers wrote, by their names.

    Nothing but the headers is read. A tree of these arrays may be ``params``: each worker then reads what its devices need.

    Args:
        path: A file or folder that all workers reach at this path.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CheckpointError: It is not a safetensors file.
        ImportError: safetensors is not installed.
    """
    library = import_optional("safetensors", "flax")
    path = os.path.abspath(os.path.expanduser(os.fspath(path)))
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(path, _FILE)]
        if os.path.exists(index := os.path.join(path, _INDEX)):
            with open(index, encoding="utf-8") as file:
                files = sorted({os.path.join(path, name) for name in json.load(file)["weight_map"].values()})
    found = {}
    for name in files:
        try:
            with library.safe_open(name, framework="numpy") as opened:
                for key in opened.keys():  # noqa: SIM118
                    shape = tuple(opened.get_slice(key).get_shape())
                    nothing = _read_opened(opened, key, (slice(0, 0),) * len(shape))
                    found[key] = StoredArray(shape, nothing.dtype, partial(_read_safetensors, name, key))
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"there is no safetensors file {name}") from error
        except library.SafetensorError as error:
            raise CheckpointError(f"{name} is not a safetensors file: {error}") from error
    return found


def _read_safetensors(file: str, name: str, slices: tuple[slice, ...]) -> Any:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return _read_opened(opened, name, slices)


def _read_opened(opened: Any, name: str, slices: tuple[slice, ...]) -> Any:
    return opened.get_slice(name)[slices] if slices else opened.get_tensor(name)
