"""Does every worker see the folder of a run? Runs in the TrainerActor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from raysgd.errors import ConfigError
from raysgd.workers.process import Worker

if TYPE_CHECKING:
    from raysgd.checkpoint.storage import Storage


async def check_storage(
    storage: Storage,
    workers: Sequence[Worker],
    gather: Callable[[Sequence[Worker], Sequence[Any]], Awaitable[list[Any]]],
) -> None:
    """Ask one worker on each other node for a probe file, where the folder is a local path.

    Args:
        storage: The folder.
        workers: All of them.
        gather: Waits for answers of workers.

    Raises:
        ConfigError: A node does not see it.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {w.info.node_id: w for w in workers if w.info is not None and w.info.node_id != here}
    if not storage.is_local or not others:
        return
    storage.write_bytes("probe", b"")
    probes = [worker.handle.probe.remote(storage.uri, "probe") for worker in others.values()]
    seen = await gather(list(others.values()), probes)
    storage.delete_file("probe")
    blind = [worker.node for worker, sees in zip(others.values(), seen, strict=True) if not sees]
    if blind:
        raise ConfigError(
            f"storage_path {storage.uri} is on one node's disk: {', '.join(blind)} cannot see it. "
            "Give RunConfig(storage_path=...) a folder all nodes share, or a URI such as s3://bucket/folder."
        )
