"""Lets a worker process leave all groups and device meshes of an attempt, whatever still refers to them. Worker side.

gloo has no abort, and a group's sockets stay open as long as anything refers to the group. See
`raysgd.backends.gloo_sockets`, and doc/design/0003-leaving-a-gloo-group.md. `install` puts a function around the one by which
torch makes every group: the default one, and those of ``new_group`` and of device meshes. Members exchange through the
group's store at which addresses they listen, and `leave_all` cuts the connections.

torch keeps device meshes in the caches of DTensor's operations, where a mesh counts as equal to one of an earlier attempt in
which this process had another place. A second function, around the constructor of meshes, makes them differ.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import weakref
from collections.abc import Callable
from typing import Any

from raysgd.backends.gloo_sockets import GlooListeners, list_listeners

#: An attribute of the functions that `install` puts in place.
_MARK = "_is_of_raysgd"
_groups: list[GlooListeners] = []
_meshes: list[weakref.ref[Any]] = []  # not a set: two meshes may be equal, and each holds groups
_generation = 0  # of groups: how often this process has left them


def install() -> None:
    """Follow the groups and meshes that are made from now on; once in a process."""
    from torch.distributed import device_mesh, distributed_c10d

    original = distributed_c10d._new_process_group_helper
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        return _make_group(original, signature.bind(*args, **kwargs).arguments, *args, **kwargs)

    setattr(make_group, _MARK, True)
    distributed_c10d._new_process_group_helper = make_group
    init = device_mesh.DeviceMesh.__init__

    @functools.wraps(init)
    def init_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _follow_mesh(self)

    device_mesh.DeviceMesh.__init__ = init_mesh  # type: ignore[method-assign]


def leave_all() -> None:
    """Cut the connections of all gloo groups at this end, and take the groups from the meshes that refer to them."""
    global _generation
    _generation += 1
    cut_all()
    for reference in _meshes:
        if (mesh := reference()) is not None:
            mesh._pg_registry.clear()
    _meshes.clear()


def destroy_all() -> None:
    """Make torch forget all groups, also a default one that was lost while it formed.

    torch destroys nothing without a default group, and numbers its groups until it is destroyed: a process that kept the
    number would wait in the store under another name than the other members of the next group.
    """
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    if not distributed_c10d.is_initialized() and (made := next(iter(world.pg_map), None)) is not None:
        distributed_c10d._update_default_pg(made)
    if distributed_c10d.is_initialized():
        with contextlib.suppress(Exception):  # the group may be broken already
            distributed_c10d.destroy_process_group()
    world.group_count = 0


def cut_all() -> None:
    """Cut the connections of all gloo groups at this end."""
    groups = list(_groups)
    _groups.clear()
    with contextlib.suppress(OSError):
        GlooListeners(
            frozenset().union(*(group.own for group in groups)),
            frozenset().union(*(group.of_peers for group in groups)),
        ).shut_down()


def _follow_mesh(mesh: Any) -> None:
    if mesh._thread_id is None:  # a part of what meshes are compared by; torch uses it for groups of threads only
        mesh._thread_id = -1 - _generation
        _meshes.append(weakref.ref(mesh))


def _make_group(original: Callable[..., Any], given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    size, rank = given["group_size"], given["group_rank"]
    if size == 1 or rank is None or not _may_use_gloo(str(given["backend"]).lower()):
        return original(*args, **kwargs)
    before = list_listeners()
    made = original(*args, **kwargs)
    own = frozenset(list_listeners() - before)
    _groups.append(GlooListeners(own))  # a member may be lost during the exchange
    store, keys = given["store"], [f"raysgd/gloo/{given['group_name']}/{member}" for member in range(size)]
    store.set(keys[rank], json.dumps(sorted(own)))
    _groups[-1] = GlooListeners.from_exchange(own, [json.loads(value) for value in store.multi_get(keys)])
    return made


def _may_use_gloo(backend: str) -> bool:
    return "gloo" in backend or backend in ("none", "undefined")
