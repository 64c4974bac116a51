"""The functions that train_func calls, public as ``raysgd.report`` and so on. Worker side; see `raysgd.session.context`.

Outside a worker the functions behave as in a world of one rank, so that the same train_func runs alone or in a debugger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from raysgd._util.text import with_article
from raysgd.data.plan import NO_DATASETS
from raysgd.errors import MetricError, UsageError
from raysgd.session import context
from raysgd.session.local import LocalSession

if TYPE_CHECKING:
    from raysgd.checkpoint.checkpoint import Checkpoint
    from raysgd.data.dataset import WorkerDataset
    from raysgd.session.live.state import LiveState


def report(metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Report metrics for one round; takes microseconds and never waits for the driver.

    Values are copied at the call: numbers, strings, bools, None, scalars of NumPy, torch, TensorFlow and JAX, a
    `raysgd.Image` or `raysgd.Histogram`, and small lists and dicts of these. A scalar on a GPU is copied without a wait and
    read in another thread, so no sync is forced.

    Args:
        metrics: A dict of metrics, in place of or in addition to keywords.
        **more: Metrics by name.

    Raises:
        MetricError: A value is not a metric (the error names its key), the metrics are larger than 1 MiB, or a key is one
            that raysgd sets itself.
        SessionError: The attempt is over.
    """
    session = context._current
    if session is None or context._outlived:
        session = context.acting()
    session.report(more if metrics is None else _merged(metrics, more))


def _merged(metrics: Any, more: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**metrics, **more}
    except TypeError:
        kind = with_article(type(metrics).__name__)
        example = metrics if isinstance(metrics, (int, float)) else "..."
        raise MetricError(
            f"report() got {kind} without a name; write report(loss={example}) or report({{'loss': {example}}})."
        ) from None


def save_checkpoint(
    state: Any,
    *,
    files: bool = False,
    metrics: Mapping[str, Any] | None = None,
    all_ranks: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Save the training state; returns after a copy into host memory, and files are written in the background.

    Every rank calls it equally often; the n-th calls form checkpoint n. Rank 0 gives the state (other ranks may give None),
    or each rank gives its own part with ``all_ranks=True``. The states of the random number generators of Python, NumPy and
    the framework are saved with it on every rank.

    Args:
        state: A tree of dicts, lists, tuples, tensors, arrays and scalars. An object with ``state_dict()`` is saved by it.
        files: ``state`` is the path of a file or folder that the user wrote; its content is the checkpoint. The folder may be
            empty, and with ``all_ranks=True`` a rank without files may give None: it loads an empty folder.
        metrics: What retention ranks this checkpoint by. The default is the round it belongs to: the last one reported
            before it, or the next one in a loop that saves before it reports.
        all_ranks: Every rank gives its own part. Of a JAX array that is distributed over workers each rank writes the
            shards that it has, and no shard is written twice.
        allow_pickle: Allow values that only pickle can hold. Loading then needs ``allow_pickle=True`` too.

    Raises:
        CheckpointError: Ranks disagree, or the state cannot be saved; `UnsafeStateError` names the leaf.
        UsageError: It is called within a step of `raysgd.Engine`, whose gradients it does not save, or by a loop that has read
            batches ahead, of which it is not known which it has used.
        SessionError: The attempt is over.
    """
    context.current().check_savable()
    context.acting().save_checkpoint(
        state, files=files, metrics=metrics, all_ranks=all_ranks, allow_pickle=allow_pickle
    )


def load_checkpoint(path: str | os.PathLike[str] | None = None, *, allow_pickle: bool = False) -> Any:
    """Return the newest committed state of this run (or the state it starts from), or None; with ``path``, the state there.

    Ranks may call it at different times during training: their n-th calls without ``path`` give the same checkpoint.

    Without ``path`` the random number generators and the positions in the datasets are restored too, so that training
    continues as if it had not been interrupted. A running loop over a dataset ends.

    An array that was saved in shards is returned as a `raysgd.SavedArray`, which reads what is needed; see
    `raysgd.jax.restore`.

    Args:
        path: A checkpoint's folder.
        allow_pickle: Load values that were saved with ``allow_pickle=True``. They may run code.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointCorruptError: Its bytes do not match its manifest.
        ReshardError: It was saved with ``all_ranks=True`` by another number of ranks, and has no arrays in shards, or has
            other values that differ between ranks.
        CheckpointError: It was saved in the middle of a dataset that now has another number of rows.
    """
    return context.acting().load_checkpoint(path, allow_pickle=allow_pickle)


def live_state(**objects: Any) -> LiveState:
    """Let training continue after a death from the state that the surviving ranks hold in memory, one step back at most.

        live = raysgd.live_state(model=model, optimizer=optimizer, scheduler=scheduler)
        if (state := raysgd.load_checkpoint()) is not None:
            live.load_state_dict(state)
        for batch in batches:
            ...
            optimizer.step()
            live.step()

    After a death ``load_checkpoint()`` returns the state after the newest complete step: a survivor's own tensors, which a new
    rank gets over the network from a survivor that holds the same. Nothing is copied before but buffers and small values, unless
    a rank holds shards that no other rank holds, as with FSDP2 over all ranks: then the state is copied to the cluster's memory
    so often that it costs at most 2 % of the time. If nothing is left of the step, the newest checkpoint is used, as without
    this function.

    Args:
        **objects: What has a ``state_dict()``: models, optimizers, schedulers.

    Raises:
        UsageError: It was called before, or with something that has no ``state_dict()``.
        SessionError: The attempt is over.
    """
    return context.acting().live_state(objects)


def list_checkpoints() -> list[Checkpoint]:
    """Return the checkpoints of this run that are on storage, oldest first.

    A checkpoint is listed when all of it is written, some time after ``save_checkpoint`` returned. The n-th calls of all
    ranks give the same list, and what is listed is not deleted before every rank has saved again.

        best = min(raysgd.list_checkpoints(), key=lambda checkpoint: checkpoint.metrics["loss"])
        model.load_state_dict(raysgd.load_checkpoint(best.path)["model"])

    Raises:
        SessionError: The attempt is over.
    """
    return context.acting().list_checkpoints()


def get_dataset(name: str | None = None) -> WorkerDataset:
    """Return a dataset given to ``run(dataset=...)``; its ``get_split()`` is this worker's shard.

    The position in it is part of each checkpoint, and `load_checkpoint` resumes there.

    Args:
        name: As given in the dict of datasets; not needed where there is only one.

    Raises:
        ConfigError: There is no dataset, none of that name, or more than one and no name.
        SessionError: The attempt is over.
    """
    return context.acting().get_dataset(name)


def get_datasets() -> dict[str, WorkerDataset] | tuple[Any, ...]:
    """Return all datasets by name; for a tuple given for cross-validation, a tuple of the same form.

    Raises:
        SessionError: The attempt is over.
    """
    return context.acting().get_datasets()


def world_rank() -> int:
    """Return this worker's rank among all ranks, 0 to ``world_size() - 1``."""
    return context.current().world_rank


def world_size() -> int:
    """Return the number of workers in this attempt."""
    return context.current().world_size


def local_rank() -> int:
    """Return this worker's rank among those on its node."""
    return context.current().identity.local_rank


def local_world_size() -> int:
    """Return the number of workers on this node."""
    return context.current().identity.local_world_size


def node_rank() -> int:
    """Return this node's rank among the nodes that have workers."""
    return context.current().identity.node_rank


def data_parallel_rank() -> int:
    """Return which replica of the model this worker holds, or holds a part of; from 0.

    Datasets and loaders are split by it. It is the world rank, unless ``Trainer(workers_per_replica=...)`` is given.
    """
    return context.current().identity.data_parallel_rank


def data_parallel_size() -> int:
    """Return the number of replicas of the model that are trained."""
    return context.current().identity.data_parallel_size


def in_worker() -> bool:
    """Return True if a Trainer runs this code, False in single-machine use."""
    return context.current().in_worker


def should_stop() -> bool:
    """Return True once the run was asked to stop: by Ctrl-C or SIGTERM in its driver, by a preemption, or by a callback's `Stop`.

    All ranks get the same answer from their n-th call, so it may decide about a loop with collectives. A loop that checks it
    can save and return in its own way. A loop that does not leaves at its next ``save_checkpoint``; after a `Stop`, or if the
    run has no checkpoint so far, at the second ``report``. A run that is cancelled, also because its grace is over, ends
    without asking.
    """
    return context.current().should_stop()


def barrier() -> None:
    """Wait until every rank has called `barrier`; a rank that has returned is not waited for."""
    context.acting().barrier()


def broadcast(obj: Any = None) -> Any:
    """Return rank 0's ``obj`` on every rank. The object must pickle.

    Raises:
        SessionError: Rank 0 has returned without calling it.
    """
    return context.acting().broadcast(obj)


def gather(obj: Any) -> list[Any]:
    """Return every rank's ``obj`` on every rank, by rank. The objects must pickle.

    It goes through the process group where the backend has one for any data, as torch's has, and is fit for megabytes;
    elsewhere through the controller, and a rank that has returned is left out.
    """
    return context.acting().gather(obj)


@contextmanager
def local(*, dataset: Any = None, dir: str | PathLike[str] | None = None) -> Iterator[LocalSession]:
    """Give a train_func that runs without a Trainer its data and a place for checkpoints.

    Args:
        dataset: As for ``Trainer.run``; Ray is needed for a `ray.data.Dataset` only.
        dir: Folder for its checkpoints; ``load_checkpoint`` finds those of earlier uses.

    Raises:
        ConfigError: ``dataset`` has a type that cannot be a dataset.
        UsageError: There is a session already.
    """
    if context.installed() is not None:
        raise UsageError("raysgd.local() inside a worker or another raysgd.local(): a session exists already.")
    plan = NO_DATASETS
    if dataset is not None:
        from raysgd.data.sources.resolve import resolve_datasets  # imports NumPy: only if there is data

        plan = resolve_datasets(dataset, put=lambda block: block)
    session = LocalSession(dir, plan)
    context.install(session)
    try:
        yield session
    finally:
        context.uninstall()
