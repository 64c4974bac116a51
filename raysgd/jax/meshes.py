"""`mesh`: a JAX mesh over the devices of all workers. Worker side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


def mesh(*axes: tuple[str, int]) -> jax.sharding.Mesh:
    """Make a mesh over all devices of all workers.

    Devices are ordered by worker, and the last axis varies fastest. Put the axis that communicates most, such as one for
    parts of a model, last: if its size divides a worker's number of devices, it stays within a worker.

    Make the mesh in each call of train_func: after a failure the devices are different ones.

    Args:
        axes: Names and sizes. One size may be -1, which takes the remaining devices. Without axes: ``("data", -1)``.

    Raises:
        ConfigError: The product of the sizes is not the number of devices.
    """
    import jax
    import numpy as np

    axes = axes or (("data", -1),)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    names = tuple(name for name, _ in axes)
    return jax.sharding.Mesh(np.array(devices).reshape(sizes_of(axes, len(devices))), names)


def sizes_of(axes: tuple[tuple[str, int], ...], num_devices: int) -> tuple[int, ...]:
    """Return the sizes of the axes, with -1 filled in.

    Raises:
        ConfigError: They do not make up that number.
    """
    shown = ", ".join(f"({name!r}, {size})" for name, size in axes)
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ConfigError(f"mesh({shown}) names an axis twice.")
    open_axes = [name for name, size in axes if size == -1]
    bad = [name for name, size in axes if size < 1 and size != -1]
    if bad or len(open_axes) > 1:
        raise ConfigError(f"mesh({shown}): give sizes of 1 and more, and -1 for at most one.")
    known = math.prod(size for _, size in axes if size != -1)
    fits = num_devices % known == 0 if open_axes else num_devices == known
    if not fits:
        needed = f"a multiple of {known}" if open_axes else str(known)
        raise ConfigError(f"mesh({shown}) needs {needed} devices; the workers have {num_devices} together.")
    return tuple(num_devices // known if size == -1 else size for _, size in axes)
