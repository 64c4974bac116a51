"""`logical_steps`: training steps whose result does not depend, to the bit, on the number of workers. Worker side.

`raysgd.session.logical` explains logical workers and the tree in which their gradients are added, and
`raysgd.torch.logical_tensors` how the ranks add them up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from raysgd._util.text import with_article
from raysgd.data.batches.batches import Batches
from raysgd.errors import ConfigError
from raysgd.session import context
from raysgd.session.logical import LogicalWorkers
from raysgd.session.logical_step import LogicalStep, iterate, workers_of
from raysgd.torch.logical_tensors import ModelArithmetic
from raysgd.torch.model import broadcast_from_rank_0, check_group, is_wrapped

T = TypeVar("T")


def logical_steps(batches: Batches[T], model: nn.Module) -> Iterator[LogicalStep[T]]:
    """Yield the steps of an epoch, each to be computed by logical workers one after the other.

        for step in raysgd.torch.logical_steps(shard.to_torch(batch_size=32), model):
            optimizer.zero_grad()
            for x, y in step:  # the batches of this process's logical workers
                loss = loss_fn(model(x), y)
                loss.backward()
                step.record(loss=loss)
            optimizer.step()
            raysgd.report(step.means())

    With ``Trainer(deterministic=True, logical_workers=L)`` all weights, buffers and metrics have the same bits on any number
    of workers. ``batch_size`` is that of a logical worker: a step consumes ``batch_size * L`` rows.

    When the inner loop ends, each parameter's ``grad`` is the mean over the rows of all logical workers (the loss must be a
    mean over the rows of its batch), added to what it was before the step. Buffers that the forward pass changes, such as the
    running statistics of batch normalization, become the mean of what the logical workers made of them; integer buffers are
    those of logical worker 0. In the inner loop random numbers are the logical worker's own; outside they are equal on all
    ranks. Gradients may be clipped or unscaled after the inner loop.

    Without a Trainer, each step is one batch.

    Args:
        batches: From ``get_split().to_torch(...)``.
        model: A plain module, on its device, not wrapped for data parallelism. All ranks begin with the weights of rank 0.

    Raises:
        ConfigError: The model is wrapped, or has complex or sparse gradients; or ``batches`` is something else.
        UsageError: There are several workers without ``Trainer(logical_workers=...)``, the inner loop was left or never
            entered, or weights were changed in it.
    """
    if is_wrapped(model):
        raise ConfigError(
            f"logical_steps() got a model that {type(model).__name__} wraps, which adds gradients in its own order: give the "
            "plain module. Models that are sharded over workers cannot be trained by logical workers."
        )
    if not isinstance(batches, Batches):
        raise ConfigError(
            f"logical_steps() got {with_article(type(batches).__name__)}; give raysgd.get_dataset().get_split().to_torch(...), "
            "whose rows raysgd divides among logical workers."
        )
    workers = workers_of(context.current())
    if workers.world_size > 1:
        check_group()
    return _iterate(batches, ModelArithmetic(model, workers), workers)


def _iterate(batches: Batches[T], arithmetic: ModelArithmetic, workers: LogicalWorkers) -> Iterator[LogicalStep[T]]:
    if workers.world_size > 1 and arithmetic.module not in workers.equal_models:
        broadcast_from_rank_0(arithmetic.module)
        workers.equal_models.add(arithmetic.module)
    yield from iterate(batches, workers, arithmetic, LogicalStep[T])


def checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of the bits of each parameter and buffer, by its name with ``checksum/`` in front.

    Report them, and `raysgd.compare_runs` names the first step and the parameters in which two runs differ. Copies all
    tensors to the host.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    return {
        f"checksum/{name}": zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else 0
        for name, tensor in plain.items()
    }
