"""How long a rank waits for the others while gradients are averaged. Worker side; CPU collectives only.

A backward pass of DDP ends with waiting for the all-reduces it started, in a callback that autograd runs when all
gradients are there. Autograd's callbacks run in the order in which they were queued, and may queue more: one queued by a
hook on a parameter comes before DDP's, which is queued when the last gradient is, and one queued by that one after it.
DDP itself stays as it is, so that users can register communication hooks of their own.

With nccl the waiting is the GPU's: DDP's callback returns at once, and nothing is seen here.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from raysgd.session.progress import Stopwatch


def time_waiting(model: DistributedDataParallel, waiting: Stopwatch) -> None:
    """Add the time that backward passes of ``model`` wait for other ranks to ``waiting``."""
    hook = _BackwardHook(waiting)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (model.find_unused_parameters or model.static_graph):
        parameters = parameters[:1]  # every one of them gets a gradient in every pass, or DDP complains
    for parameter in parameters:
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]


class _BackwardHook:
    """A parameter's hook: has autograd time what is left of a backward pass when its own part is done."""

    #: The last pass that is timed, by any hook: several models may take part in one, which waits once.
    _timed = -1

    def __init__(self, waiting: Stopwatch) -> None:
        self._waiting = waiting

    def __call__(self, gradient: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != _BackwardHook._timed:
            _BackwardHook._timed = backward
            _at_the_end(self._begin)

    def _begin(self) -> None:
        began = time.monotonic()
        _at_the_end(lambda: self._waiting.add(time.monotonic() - began))


def _at_the_end(callback: Any) -> None:
    """Call it at the end of the backward pass that is under way."""
    Variable._execution_engine.queue_callback(callback)
