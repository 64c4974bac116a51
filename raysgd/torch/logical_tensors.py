"""The tensors of a step of logical workers: the flat vector that each adds, and how the ranks add them up. Worker side.

See `raysgd.torch.logical`. The ranks add like a reduce-scatter: rank r gets chunk r of all nodes of all ranks, adds them in
the order of the tree, divides, and sends the result to all. Where ranks have equal powers of two of logical workers, that is
as much data as in a ring all-reduce; elsewhere up to 2 * log2(logical_workers) times as much goes to the chunks' owners.

Precision: vectors are of float32, or of float64 if the model has parameters of that type.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from raysgd.errors import ConfigError, UsageError
from raysgd.session.logical import LogicalWorkers, Node, TreeSum, border_nodes
from raysgd.session.logical_step import MAX_METRICS
from raysgd.torch.reduction import all_gather_into_one

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: A buffer: its module, which may replace the tensor, and its name there.
_Place = tuple[nn.Module, str]


class Vector:
    """All tensors that a logical worker, or a node of the tree, adds to a step, as one flat tensor.

    First what becomes a mean: gradients, changes of floating-point buffers, metrics. Then what becomes a sum: changes of
    integer buffers, which only logical worker 0 has, and for each parameter the number of logical workers that have a
    gradient of it, for each buffer the number of those that have changed it.
    """

    def __init__(self, layout: Layout) -> None:
        self.flat = torch.zeros(layout.size, dtype=layout.dtype, device=layout.device)
        parts = [self.flat[start:stop] for start, stop in pairwise(layout.ends)]
        self.gradients = [
            part.view(shape) for part, shape in zip(_take(parts, layout.parameters), layout.parameters, strict=True)
        ]
        self.floats = [part.view(shape) for part, shape in zip(_take(parts, layout.floats), layout.floats, strict=True)]
        (self.metrics,) = _take(parts, [None])
        self.integers = [
            part.view(shape) for part, shape in zip(_take(parts, layout.integers), layout.integers, strict=True)
        ]
        self.has_gradient, self.has_change = _take(parts, [None, None])


def _take(parts: list[torch.Tensor], like: list[Any]) -> list[torch.Tensor]:
    """Remove and return as many parts as ``like`` has elements."""
    taken = parts[: len(like)]
    del parts[: len(like)]
    return taken


@dataclass(frozen=True)
class Layout:
    """The parts of a `Vector`: the shapes of parameters and of buffers that change.

    Attributes:
        num_means: Elements that become means.
        size: Elements, of which the last ones are padding: divisible by the number of ranks.
        ends: Where each part begins, and where the last one ends.
    """

    parameters: list[torch.Size]
    floats: list[torch.Size]
    integers: list[torch.Size]
    num_buffers: int
    num_ranks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_means(self) -> int:
        return sum(map(torch.Size.numel, [*self.parameters, *self.floats])) + MAX_METRICS

    @property
    def ends(self) -> list[int]:
        means = [*map(torch.Size.numel, [*self.parameters, *self.floats]), MAX_METRICS]
        return list(
            accumulate(
                [*means, *map(torch.Size.numel, self.integers), len(self.parameters), self.num_buffers], initial=0
            )
        )

    @property
    def size(self) -> int:
        return self.ends[-1] + -self.ends[-1] % self.num_ranks


class ModelArithmetic:
    """Adds what logical workers compute with a model; an `Arithmetic`.

    In the first step all buffers count as changing; those that no logical worker changes are left out from then on.
    """

    metric_names: list[str] | None = None

    def __init__(self, module: nn.Module, workers: LogicalWorkers) -> None:
        self.module = module
        self._exchange = Exchange(workers)
        self._num_ranks = workers.world_size
        #: Where the buffers are: a module may replace the tensor.
        places = [
            (part, name) for part in module.modules() for name, buffer in part._buffers.items() if buffer is not None
        ]
        self._floats = [place for place in places if _read_buffer(place).is_floating_point()]
        self._integers = [place for place in places if not _read_buffer(place).is_floating_point()]
        self._fixed: list[_Place] = []
        self._is_first_step = True
        self._parameters: list[nn.Parameter] = []
        self._layout: Layout | None = None
        self._free: list[Vector] = []
        #: The vector that the parameters' gradients are part of since the last step.
        self._given: Vector | None = None
        self._kept: list[torch.Tensor | None] = []
        self._before: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._fixed_versions: list[int] = []
        self._is_changed = False
        self._read_parameters()

    @property
    def num_means(self) -> int:
        """Elements of a vector that become means."""
        assert self._layout is not None
        return self._layout.num_means

    def begin_step(self) -> None:
        """Take away the gradients that there are, and remember the buffers."""
        self._read_parameters()
        self._kept = [parameter.grad for parameter in self._parameters]
        given = self._given
        if given is not None and not any(map(_is_same, self._kept, given.gradients)):
            self._free.append(given)
        self._given = None
        buffers = self._changing()
        if self._before:
            torch._foreach_copy_(self._before, buffers)
        else:
            self._before = [buffer.clone() for buffer in buffers]
        self._is_changed = False
        self._versions = [parameter._version for parameter in self._parameters]

    def begin_leaf(self) -> None:
        """Prepare for the batch of a logical worker, which begins with the buffers of the step's beginning."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._is_changed:
            for buffer, before in zip(self._changing(), self._before, strict=True):
                buffer.copy_(before)
        self._is_changed = True
        self._fixed_versions = [_read_buffer(place)._version for place in self._fixed]

    def end_leaf(self, metrics: list[Any], *, weight: int, is_first: bool) -> Vector:
        """Return what a logical worker adds to the step."""
        self._check_unchanged()
        vector = self._make_vector()
        with torch.no_grad():
            self._collect_gradients(vector)
            changing = self._changing()
            floats, integers = changing[: len(self._floats)], changing[len(self._floats) :]
            for change, buffer, before in zip(vector.floats, floats, self._before, strict=False):
                # A mask has elements that are infinite, and infinity minus itself is not a number.
                change.copy_(torch.where(buffer == before, 0, buffer.to(change.dtype) - before.to(change.dtype)))
            vector.metrics.zero_()
            for index, value in enumerate(metrics):
                vector.metrics[index] = value.detach() if isinstance(value, torch.Tensor) else value
            if weight != 1:
                vector.flat.mul_(weight)
            for change, buffer, before in zip(vector.integers, integers, self._before[len(floats) :], strict=True):
                change.copy_(buffer.long() - before.long()) if is_first else change.zero_()
            vector.has_gradient.copy_(torch.tensor([parameter.grad is not None for parameter in self._parameters]))
            vector.has_change.zero_()
            if self._is_first_step:
                pairs = zip(changing, self._before, strict=True)
                vector.has_change.copy_(torch.tensor([not torch.equal(*pair) for pair in pairs]))
        for parameter in self._parameters:
            parameter.grad = None
        return vector

    def empty_leaf(self) -> Vector:
        """Return what a logical worker without rows adds."""
        vector = self._make_vector()
        vector.flat.zero_()
        return vector

    def add(self, left: Vector, right: Vector) -> Vector:
        """Add the right node to the left one."""
        left.flat.add_(right.flat)
        self.free(right)
        return left

    def free(self, vector: Vector) -> None:
        """Use the vector again later."""
        self._free.append(vector)

    def describe(self) -> None:
        """Return nothing: the model says what is added."""

    def inherit(self, described: None) -> None:
        """Do nothing."""

    @torch.no_grad()
    def finish(self, nodes: list[tuple[Node, Vector]], divisor: int) -> list[Any]:
        """Set gradients and buffers to the means of all logical workers, and return the means of the metrics."""
        mean = self._exchange.mean(nodes, self, divisor)
        has_gradient = mean.has_gradient.tolist()
        for index, (parameter, kept) in enumerate(zip(self._parameters, self._kept, strict=True)):
            gradient: torch.Tensor | None = mean.gradients[index] if has_gradient[index] else None
            if gradient is not None and gradient.dtype != parameter.dtype:
                gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if kept is None else kept if gradient is None else kept.add_(gradient)
        changing, means = self._changing(), [*mean.floats, *mean.integers]
        for buffer, before, change in zip(changing, self._before, means, strict=True):
            buffer.copy_(
                before.to(change.dtype) + change if buffer.is_floating_point() else before.long() + change.long()
            )
        self._kept = []
        self._given = mean
        metrics = mean.metrics.tolist() if mean.flat.device.type == "cpu" else list(mean.metrics.clone())
        if self._is_first_step:
            self._leave_out_fixed(mean.has_change.tolist())
        return metrics

    def _read_parameters(self) -> None:
        """Find the parameters that are trained now."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not self._parameters or [*map(id, parameters)] != [*map(id, self._parameters)]:
            self._parameters = parameters
            self._set_layout()

    def _collect_gradients(self, vector: Vector) -> None:
        views, gradients = [], []
        for view, parameter in zip(vector.gradients, self._parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(parameter.grad)
        if any(gradient.is_sparse for gradient in gradients):
            raise ConfigError(
                "logical_steps() adds dense gradients, and a layer made sparse ones: give it sparse=False."
            )
        torch._foreach_copy_(views, gradients)

    def _leave_out_fixed(self, has_change: list[float]) -> None:
        """Leave out buffers that no logical worker has changed in the first step."""
        self._is_first_step = False
        places = [*self._floats, *self._integers]
        changing = [place for place, count in zip(places, has_change, strict=True) if count or _is_statistic(place)]
        self._fixed = [place for place in places if place not in changing]
        self._floats = [place for place in self._floats if place in changing]
        self._integers = [place for place in self._integers if place in changing]
        self._set_layout()

    def _set_layout(self) -> None:
        kinds = {parameter.dtype for parameter in self._parameters} | {
            _read_buffer(place).dtype for place in self._floats
        }
        if not self._parameters:
            raise ConfigError(
                "logical_steps() got a model in which nothing is trained: no parameter requires a gradient."
            )
        if other := sorted(str(kind) for kind in kinds if kind not in _FLOATS):
            raise ConfigError(
                f"logical_steps() adds real numbers of up to 64 bits, and the model has {', '.join(other)}."
            )
        devices = {
            tensor.device for tensor in (*self._parameters, *map(_read_buffer, (*self._floats, *self._integers)))
        }
        if len(devices) != 1:
            found = " and ".join(sorted(map(str, devices)))
            raise ConfigError(f"logical_steps() takes a model on one device; this one is on {found}.")
        self._layout = Layout(
            [parameter.shape for parameter in self._parameters],
            [_read_buffer(place).shape for place in self._floats],
            [_read_buffer(place).shape for place in self._integers],
            len(self._floats) + len(self._integers),
            self._num_ranks,
            torch.float64 if torch.float64 in kinds else torch.float32,
            devices.pop(),
        )
        self._free, self._before, self._given = [], [], None

    def _make_vector(self) -> Vector:
        assert self._layout is not None
        return self._free.pop() if self._free else Vector(self._layout)

    def _changing(self) -> list[torch.Tensor]:
        return [_read_buffer(place) for place in (*self._floats, *self._integers)]

    def _check_unchanged(self) -> None:
        if [parameter._version for parameter in self._parameters] != self._versions:
            raise UsageError(
                "weights changed in the loop over a step of logical_steps(), before all logical workers had computed: call "
                "optimizer.step() after that loop."
            )
        for place, version in zip(self._fixed, self._fixed_versions, strict=True):
            if _read_buffer(place)._version != version:
                raise UsageError(
                    f"buffer {place[1]!r} of {type(place[0]).__name__} changed for the first time after the first step of "
                    "logical_steps(), which found that it stays as it is: call logical_steps() again where it begins to change."
                )


def _read_buffer(place: _Place) -> torch.Tensor:
    module, name = place
    return cast(torch.Tensor, module._buffers[name])


def _is_statistic(place: _Place) -> bool:
    """Whether it is a running statistic, which the kernel changes without counting a new version of the tensor."""
    return isinstance(place[0], nn.modules.batchnorm._NormBase)


def _is_same(a: Any, b: Any) -> bool:
    return a is b


class Exchange:
    """Adds the nodes of all ranks."""

    def __init__(self, workers: LogicalWorkers) -> None:
        self._num_leaves = workers.num_workers
        self._borders = [
            border_nodes(workers.range_of(rank), workers.num_workers) for rank in range(workers.world_size)
        ]
        self._num_ranks = workers.world_size
        self._received: torch.Tensor | None = None

    def mean(self, nodes: list[tuple[Node, Vector]], model: ModelArithmetic, divisor: int) -> Vector:
        """Return the sum of all logical workers, divided where it becomes a mean. Every rank calls it."""
        vectors = [vector for _, vector in nodes]
        result = vectors[0]
        if self._num_ranks == 1:
            result.flat[: model.num_means].div_(divisor)
            return result
        if self._num_ranks == 2 and all(len(nodes) == 1 for nodes in self._borders):
            both = self._receive_into(2 * len(result.flat), result.flat)  # as much data as in chunks, in one collective
            all_gather_into_one(both, result.flat)
            left, right = both.view(2, -1)
            torch.add(left, right, out=result.flat)
            result.flat[: model.num_means].div_(divisor)
            return result
        rank, chunk = dist.get_rank(), len(result.flat) // self._num_ranks
        tree = TreeSum[torch.Tensor](self._num_leaves, torch.Tensor.add_)
        for node, values in zip(chain.from_iterable(self._borders), self._send_chunks(vectors, chunk), strict=True):
            tree.put(node, values)
        total = tree.take_root()
        total[: max(0, model.num_means - rank * chunk)].div_(divisor)
        all_gather_into_one(result.flat, total)
        for vector in vectors[1:]:
            model.free(vector)
        return result

    def _send_chunks(self, vectors: list[Vector], chunk: int) -> tuple[torch.Tensor, ...]:
        """Send each rank its chunk of the nodes here, and return this rank's chunk of all nodes."""
        flats = [vector.flat for vector in vectors]
        sent = flats[0]
        if len(flats) > 1:
            sent = torch.stack([flat.view(self._num_ranks, chunk) for flat in flats], dim=1).view(-1)
        counts = [len(nodes) * chunk for nodes in self._borders]
        received = self._receive_into(sum(counts), sent)
        dist.all_to_all_single(received, sent, counts, [len(flats) * chunk] * self._num_ranks)
        return torch.split(received, chunk)

    def _receive_into(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor for what other ranks send; it is the same in each step."""
        if self._received is None or len(self._received) != size:
            self._received = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._received
