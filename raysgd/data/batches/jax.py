"""Batches as JAX takes them. Worker side; JAX is imported when the first batch is handed over.

Batches are made as NumPy arrays, perhaps in another thread, and put on a device in the loop's thread, since JAX's settings
are per thread. JAX and TensorFlow share the memory of arrays or copy it later, so arrays that ``collate_fn`` could overwrite
are copied at once. JAX arrays are read-only: on the CPU they may share the dataset's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysgd.data.batches.conversion import Conversion
from raysgd.data.batches.values import Origin, Path, cast, check_range, copy_writeable_arrays, rebuild, unsupported_type
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


class JaxConversion(Conversion):
    """Makes NumPy arrays of types that NumPy and JAX share; `JaxPut` makes JAX arrays of them."""

    def as_dtype(self, dtype: Any) -> Any:
        try:
            return np.dtype(dtype)
        except TypeError as error:
            raise ConfigError(
                f"dtypes={dtype!r} is not a dtype: give one that NumPy takes, or a dict of them by column."
            ) from error

    def convert(self, values: NDArray[Any], dtype: Any, origin: Origin, path: Path) -> NDArray[Any]:
        return values if dtype is None else cast(values, dtype, origin.describe(path))

    def finish(self, batch: Any, origin: Origin) -> Any:
        return copy_writeable_arrays(batch)


@dataclass(frozen=True)
class JaxPut:
    """Turns all NumPy arrays of a batch into JAX arrays; other values stay as they are. A `Transfer`.

    Attributes:
        device: A `jax.Device` or a `jax.sharding.Sharding`; None for JAX's default device.
    """

    origin: Origin
    device: jax.Device | jax.sharding.Sharding | None

    def prepare(self) -> None:
        """Nothing to prepare."""

    def begin(self, batch: Any) -> Any:
        """Return the batch: JAX's settings are those of the loop's thread, so `finish` does the work."""
        return batch

    def finish(self, begun: Any) -> Any:
        """Return the batch as JAX arrays.

        Raises:
            ConfigError: JAX has no type for a value, integers are out of range, or rows do not fit the sharding.
        """
        return self._put(begun, ())

    def _put(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return {key: self._put(part, (*path, key)) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return rebuild(value, [self._put(part, (*path, index)) for index, part in enumerate(value)])
        return self._array(value, path) if isinstance(value, np.ndarray) else value

    def _array(self, values: NDArray[Any], path: Path) -> jax.Array:
        import jax

        if values.size and values.dtype.kind in "iu":
            becomes = jax.dtypes.canonicalize_dtype(values.dtype)
            check_range(
                values, becomes, self.origin.describe(path), "set jax_enable_x64, or map the values to smaller ones"
            )
        try:
            put: jax.Array = self._on_device(values)
        except TypeError as error:
            raise unsupported_type(values, self.origin, path, "JAX") from error
        except ValueError as error:
            raise ConfigError(
                f"{self.origin.describe(path)}, of shape {values.shape}, cannot be put on {self.device}: "
                f"{str(error).splitlines()[0]} If this is the short last step, leave it out with drop_last=True."
            ) from error
        return put

    def _on_device(self, values: NDArray[Any]) -> Any:
        import jax

        if spans_workers(self.device):  # all workers' batches together are one global array
            make_global_array: Any = jax.make_array_from_process_local_data
            return make_global_array(self.device, values)
        return jax.device_put(values, self.device)


def spans_workers(device: Any) -> bool:
    """Whether the device is a sharding that includes devices of other processes."""
    return device is not None and not getattr(device, "is_fully_addressable", True)


def check_sharding(device: Any, drop_last: bool) -> None:
    """Raise a ConfigError if ranks could have batches of different lengths, from which JAX makes a different array on each."""
    if spans_workers(device) and not drop_last:
        raise ConfigError(
            "to_jax(device=...) is a sharding over the devices of several workers, which needs equally long batches on all "
            "ranks: give drop_last=True."
        )
