"""A mesh over the devices of all workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raysgd.errors import ConfigError

if TYPE_CHECKING:
    import jax


def mesh(*axes: tuple[str, int]) -> jax.sharding.Mesh:
    """A mesh over all devices of all workers, with these axes: names and sizes.

    Devices are taken worker by worker, and the last axis runs fastest. So an axis for parts of a model, which communicate
    most, comes last: if it is no larger than a worker's number of devices (and divides it), it stays within a worker.

    It is made anew in each call of train_func: after a failure the devices are others.

    Args:
        axes: One size may be -1: what is left. Without axes, ``("data", -1)``.

    Raises:
        ConfigError: The sizes do not make up the number of devices.
    """
    import jax
    import numpy as np

    axes = axes or (("data", -1),)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    names = tuple(name for name, _ in axes)
    return jax.sharding.Mesh(np.array(devices).reshape(sizes_of(axes, len(devices))), names)


def sizes_of(axes: tuple[tuple[str, int], ...], num_devices: int) -> tuple[int, ...]:
    """The sizes, with -1 filled in.

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
