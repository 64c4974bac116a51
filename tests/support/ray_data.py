"""Ray Data in a test cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_data_in_use() -> Iterator[None]:
    """Ray Data with its own actors, which it keeps for the life of the cluster."""
    import ray
    import ray.data
    from ray.util import list_named_actors

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    ray.data.range(2, override_num_blocks=1).materialize()
    yield
    for actor in list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
