"""A model and its training step on fake tensors: what it holds in memory, and how much it computes.

The model is built on the meta device; nothing is allocated and nothing is computed. Of blocks that are built alike, the first
two and the last one are traced, and the second one stands for the others, so that a deep model takes as long as a shallow one.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils._pytree import tree_leaves, tree_map

from raysgd.engine.config import Precision
from raysgd.engine.model.blocks import find_stacks, is_inside
from raysgd.engine.planning.memory_tracker import AsOnCuda, Level, StepTracker, key_of, tensors_of
from raysgd.engine.tensor_parallel import check_own_plan, make_tensor_plan, match_modules
from raysgd.engine.tensor_parallel.attention import ShardedMultiheadAttention
from raysgd.engine.tensor_parallel.layers import ColumnLinear, RowLinear, Style
from raysgd.errors import ConfigError

T = TypeVar("T")
Batch = Any
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
OptimizerFn = Callable[[Any], torch.optim.Optimizer]
DeviceType = Literal["cuda", "cpu"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_kv_heads")


#: How layers of the engine's own plan shard weights, as `StepTracker` takes it.
_KINDS: dict[Any, str] = {ShardedMultiheadAttention: "column", ColumnLinear: "column", RowLinear: "row"}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter; tied parameters are one.

    Attributes:
        names: Its names in the model.
        shape: Its whole shape.
        itemsize: Bytes of an element that the model computes with.
        master_itemsize: Bytes of an element of the fp32 master weight, with ``precision="bf16-true"``; 0 if there is none.
        block: Index of its block, or None for a parameter outside the blocks.
        tensor_dim: The dimension that tensor parallelism shards; None if each rank has it whole.
        is_trainable: Whether it has a gradient and optimizer state.
        state: Bytes of optimizer state: for each element, and of other shapes, such as step counts.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int
    master_itemsize: int
    block: int | None
    tensor_dim: int | None
    is_trainable: bool
    state: tuple[float, float]

    def num_elements(self, tensor_parallel: int = 1, shards: int = 1) -> int:
        """Count the elements on the rank that has most of them; ZeRO shards `zero_dim`."""
        counts = {self.tensor_dim: tensor_parallel}
        shape = [-(-size // counts.get(dim, 1)) for dim, size in enumerate(self.shape)]
        if shape:
            dim = self.zero_dim(tensor_parallel)
            shape[dim] = -(-shape[dim] // shards)
        return prod(shape)

    def zero_dim(self, tensor_parallel: int) -> int:
        """Return the dimension that ZeRO shards: the first if tensor parallelism leaves it, as FSDP2 does."""
        return 1 if tensor_parallel > 1 and self.tensor_dim == 0 and len(self.shape) > 1 else 0


class TracedModel:
    """A model on the meta device, its parameters, and its training step for micro-batches of any size.

    The arguments are those of `raysgd.engine.plan`. With a function as ``tensor_plan`` or none, the engine's own plan of tensor
    parallelism says how layers are sharded.

    Attributes:
        parameters: All parameters, tied ones once.
        buffer_bytes: Bytes of all buffers.
        stacks: The blocks of each list of blocks, by its name.
        blocks: All of them.
        has_own_plan: Whether the user has a plan of tensor parallelism.
        head_counts: Numbers of attention heads, which ``tensor_parallel`` must divide if a user's plan shards them.
        obstacle: Why tensor parallelism cannot shard layers; None if it can.
        returns_loss: Whether the model took a dict in the last trace, and returned its loss.

    Raises:
        ConfigError: The model cannot be built on the meta device or has nothing to train, the batch has no rows, the optimizer
            cannot make a step without data, or the tensor plan is not one for this model.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch: Batch,
        optimizer_fn: OptimizerFn,
        *,
        loss_fn: LossFn | None = None,
        precision: Precision = "fp32",
        device: DeviceType = "cuda",
        tensor_plan: Any = None,
    ) -> None:
        self.model = model = _build_on_meta(model_fn)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._precision, self._device = precision, device
        self._dtype = torch.bfloat16 if precision == "bf16-true" else None
        self._batch, self._loss_fn = batch, loss_fn or compute_loss
        self._cache: dict[Any, Any] = {}
        self.returns_loss = False
        self.num_rows = count_rows(batch)
        with self._mode:
            _replace_by_fakes(model, self._dtype)
        for module in model.train().modules():
            if isinstance(module, nn.MultiheadAttention) and device == "cuda":
                module.dropout = 0.0  # fused kernels keep nothing for it, those of the CPU cannot do it
        self.stacks = {name: list(blocks.values()) for name, blocks in find_stacks(model).items()}
        self.blocks = [block for blocks in self.stacks.values() for block in blocks]
        self.head_counts: tuple[int, ...] = ()
        self.has_own_plan = tensor_plan is not None
        self._kinds: dict[nn.Parameter, tuple[str, int]] = {}
        self.obstacle = self._read_tensor_plan(tensor_plan)
        self.parameters = self._describe_parameters(optimizer_fn)
        self.buffer_bytes = sum({key_of(one): one.untyped_storage().nbytes() for one in model.buffers()}.values())

    @property
    def num_parameters(self) -> int:
        return sum(one.num_elements() for one in self.parameters)

    def cached(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return what was computed for a key, or compute it."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]  # type: ignore[no-any-return]

    def levels(
        self, num_rows: int, tensor_parallel: int = 1, *, sequence_parallel: bool = False, has_copies: bool = True
    ) -> list[Level]:
        """Return what each segment of a step of a micro-batch adds on one rank, in forward order; see `StepTracker.levels`.

        Raises:
            ConfigError: The model's code fails on fake tensors, for instance because it reads values.
        """
        tracker, places = self._traced(num_rows)

        def compute() -> list[Level]:
            found = tracker.levels(tensor_parallel, sequence_parallel=sequence_parallel, has_copies=has_copies)
            return [found[segment]._replace(block=block) for segment, block in places]

        return self.cached(("levels", num_rows, tensor_parallel, sequence_parallel, has_copies), compute)

    def work(self, num_rows: int) -> tuple[float, float, float]:
        """Return how many FLOPs and operations a step of a micro-batch has, and which share of the FLOPs is in blocks."""
        tracker, places = self._traced(num_rows)
        segments = [tracker.segments[segment] for segment, _ in places]
        flops, num_operations = sum(one.flops for one in segments), sum(one.kernels for one in segments)
        return flops, num_operations, sum(one.flops for one in segments if one.block is not None) / max(1.0, flops)

    def _traced(self, num_rows: int) -> tuple[StepTracker, list[tuple[int, int | None]]]:
        """Trace a step; return it with the segment and the block of each part of the whole model."""
        return self.cached(("trace", num_rows), lambda: self._trace_alike(num_rows))

    def _trace_alike(self, num_rows: int) -> tuple[StepTracker, list[tuple[int, int | None]]]:
        whole = list(range(len(self.blocks)))
        for twins in (_find_twins(self.stacks.values()), whole):
            try:
                with _shortened(self.model, self.stacks, {id(self.blocks[one]) for one in twins}):
                    tracker = self._trace(num_rows)
                break
            except ConfigError:  # the model may count its blocks
                if twins == whole:
                    raise
        places: list[tuple[int, int | None]] = []
        for number, segment in enumerate(tracker.segments):
            blocks = [index for index, one in enumerate(twins) if one == segment.block]
            places += [(number, index) for index in blocks] if blocks else [(number, None)]
        return tracker, places

    def _trace(self, num_rows: int) -> StepTracker:
        with self._mode, contextlib.ExitStack() as stack:
            batch = make_batch(self._batch, num_rows, self._dtype)
            kinds = {key_of(one): kind for one, (kind, _) in self._kinds.items()}
            tied = [one.shape for one in self.parameters if len(one.names) > 1]
            tracker = StepTracker([*self.model.parameters(), *self.model.buffers(), *tensors_of(batch)], kinds, tied)
            for hook in self._follow(tracker):
                stack.callback(hook.remove)
            stack.callback(self.model.zero_grad)
            if self._device == "cuda":
                stack.enter_context(AsOnCuda())
            stack.enter_context(tracker)
            call = "loss_fn(model, batch)" if self._loss_fn is not compute_loss else _say_call(self.model, batch)
            try:
                with torch.autocast("cpu", _AUTOCAST.get(self._precision), enabled=self._precision in _AUTOCAST):
                    # The output lives until the backward pass has ended, as in a training loop.
                    loss = self._loss_fn(self.model, batch)
                self.returns_loss = isinstance(batch, Mapping) and hasattr(loss, "_raysgd_output")
                tracker.enter(tracker.now, is_backward=True)
                call = "loss.backward()"
                loss.backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                raise ConfigError(_explain_trace_error(error, call, batch)) from error
            tracker.enter(tracker.now, is_backward=True)
            return tracker

    def _follow(self, tracker: StepTracker) -> Iterator[Any]:
        """Make hooks by which the tracker notes where blocks begin and end, in both passes, and what the gradients are."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(tracker.note_gradient)  # type: ignore[no-untyped-call]
                yield parameter.register_post_accumulate_grad_hook(lambda one: tracker.note_gradient(one.grad))  # type: ignore[no-untyped-call]
        last = {id(blocks[-1]) for blocks in self.stacks.values()}

        def begin(module: Any, args: Any, kwargs: Any, index: int) -> None:
            before, segment = tracker.now, tracker.begin(index)

            def leave() -> None:
                if tracker.now == segment:
                    tracker.enter(before, is_backward=True)

            _mark((args, kwargs), leave)

        def end(module: nn.Module, args: Any, out: Any) -> None:
            segment = tracker.now
            tracker.note_outputs(out)
            _mark(out, lambda: tracker.enter(segment, is_backward=True))
            if id(module) in last:  # what the caller does between two blocks of a stack belongs to the first one
                tracker.begin(None)

        for index, block in enumerate(self.blocks):
            yield block.register_forward_pre_hook(partial(begin, index=index), with_kwargs=True)
            yield block.register_forward_hook(end)

    def _read_tensor_plan(self, plan: Any) -> str | None:
        """Find how tensor parallelism shards weights; return why it cannot."""
        if plan is not None:
            check_own_plan(self.model, plan)
        if isinstance(plan, Mapping):
            named = dict(self.model.named_modules())
            self._read_styles({path: style for key, style in plan.items() for path in match_modules(key, named)})
            modules = [module for block in self.blocks for module in block.modules()]
            owners = [*modules, *(getattr(one, "config", None) for one in modules)]
            counts = {getattr(one, name, None) for one in owners for name in _HEADS}
            self.head_counts = tuple(sorted(one for one in counts if type(one) is int and one > 0))
            return None if self._kinds else "the tensor_plan shards no layer of the model"
        try:
            styles = make_tensor_plan(self.model, 1).styles
        except ConfigError as error:
            unknown = "it is not known which layers the function given as tensor_plan shards: give a dict of styles"
            return str(error) if plan is None else unknown
        self._read_styles(styles)
        return None

    def _read_styles(self, styles: Mapping[str, ParallelStyle]) -> None:
        for path, style in styles.items():
            module = self.model.get_submodule(path)
            if isinstance(style, Style):
                kind = _KINDS.get(style.layer, "whole")
                dims = {name: getattr(placement, "dim", None) for name, placement in style.placements.items()}
            elif isinstance(style, (ColwiseParallel, RowwiseParallel)):
                is_column = isinstance(style, ColwiseParallel)
                layouts = style.output_layouts if isinstance(style, ColwiseParallel) else style.input_layouts
                # What an embedding or a head returns is whole on each rank.
                is_whole = layouts == (Replicate(),) or not any(is_inside(path, one) for one in self.stacks)
                kind = "whole" if is_whole else "column" if is_column else "row"
                dims = {"weight": 0 if is_column == isinstance(module, nn.Linear) else 1}
                dims |= {"bias": 0} if is_column else {}
            else:
                continue
            for name, dim in dims.items():
                if dim is not None and (parameter := getattr(module, name, None)) is not None:
                    self._kinds[parameter] = (kind, dim)

    def _describe_parameters(self, optimizer_fn: OptimizerFn) -> tuple[Parameter, ...]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        if not names:
            raise ConfigError("The model has no parameters, so there is nothing to plan.")
        if not any(one.requires_grad for one in names):
            raise ConfigError(
                "All parameters of the model are frozen (requires_grad=False), so there is nothing to train: unfreeze those "
                "that shall be trained, by parameter.requires_grad_(True)."
            )
        has_masters = self._dtype is not None
        kinds = {one: (one.shape, torch.float32 if has_masters else one.dtype) for one in names if one.requires_grad}
        with self._mode:
            states = _find_state_bytes(set(kinds.values()), optimizer_fn)
        blocks = {parameter: index for index, block in enumerate(self.blocks) for parameter in block.parameters()}
        return tuple(
            Parameter(
                names=tuple(names[one]),
                shape=tuple(one.shape),
                itemsize=one.element_size(),
                master_itemsize=4 if has_masters and one.requires_grad else 0,
                block=blocks.get(one),
                tensor_dim=self._kinds[one][1] if one in self._kinds else None,
                is_trainable=one.requires_grad,
                state=states[kinds[one]] if one in kinds else (0, 0),
            )
            for one in names
        )


def _find_state_bytes(kinds: set[Any], optimizer_fn: OptimizerFn) -> dict[Any, tuple[float, float]]:
    """Make one step of the optimizer on fake parameters, and sum what it keeps: for each element, and in other shapes."""
    copies = {kind: nn.Parameter(torch.empty(kind[0], dtype=kind[1])) for kind in kinds}
    for copy in copies.values():
        copy.grad = torch.empty_like(copy)
    optimizer = optimizer_fn(list(copies.values()))
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigError(_explain_step_error(optimizer, error)) from error
    sizes: dict[Any, tuple[float, float]] = {}
    for kind, copy in copies.items():
        kept = tensors_of(optimizer.state.get(copy, {}))
        like = [one for one in kept if one.shape == copy.shape and one.dim()]
        other = sum(one.nbytes for one in kept) - sum(one.nbytes for one in like)
        sizes[kind] = (sum(one.element_size() for one in like), other)
    return sizes


def _mark(tree: Any, reached: Callable[[], Any]) -> None:
    """Call a function when the gradient of the first tensor that has one is complete."""

    def call(_: torch.Tensor) -> None:
        reached()

    for leaf in tensors_of(tree):
        if leaf.requires_grad:
            leaf.register_hook(call)  # type: ignore[no-untyped-call]
            return


def _find_twins(stacks: Iterable[list[nn.Module]]) -> list[int]:
    """Return the block that is traced for each one: itself, or the one before if the last three are built alike."""
    twins: list[int] = []
    for blocks in stacks:
        first, builds = len(twins), [_describe_build(block) for block in blocks]
        for place, build in enumerate(builds):
            is_twin = 2 <= place < len(builds) - 1 and build == builds[place - 1] == builds[place - 2]
            twins.append(twins[-1] if is_twin else first + place)
    return twins


def _describe_build(block: nn.Module) -> Any:
    parameters = tuple((name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters())
    return type(block), repr(block), parameters, tuple((name, tuple(one.shape)) for name, one in block.named_buffers())


@contextlib.contextmanager
def _shortened(model: nn.Module, stacks: Iterable[str], kept: set[int]) -> Iterator[None]:
    """Leave out all blocks but those of some ids."""
    whole = {name: model.get_submodule(name)._modules for name in stacks}
    try:
        for name, blocks in whole.items():
            own = [block for block in blocks.values() if id(block) in kept]
            model.get_submodule(name)._modules = {str(place): block for place, block in enumerate(own)}
        yield
    finally:
        for name, blocks in whole.items():
            model.get_submodule(name)._modules = blocks


def _build_on_meta(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Make a model on the meta device. Errors that are not due to this device are not changed."""
    try:
        with torch.device("meta"):
            model = model_fn()
    except Exception as error:
        if not isinstance(error, NotImplementedError) and not re.search(r"\bmeta\b", str(error)):
            raise
        raise ConfigError(
            f"The model cannot be built without data: {_say(error)} model_fn runs on the meta device, where tensors have no "
            "values. It must not move the model (.to(), .cuda()), nor load weights; and where it reads numbers out of tensors "
            '(.item(), .tolist(), float()), compute them in Python, or by torch on device="cpu".'
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_fn returned {type(model).__name__}; it has to return a torch.nn.Module.")
    return model


def _replace_by_fakes(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace meta tensors by fake ones of the CPU; tied parameters stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, one in tensors.items():
                if one is not None and one not in made:
                    kind = dtype if dtype is not None and one.is_floating_point() else one.dtype
                    fake = torch.empty_strided(one.size(), one.stride(), dtype=kind)
                    made[one] = nn.Parameter(fake, one.requires_grad) if isinstance(one, nn.Parameter) else fake
                if one is not None:
                    tensors[name] = made[one]  # type: ignore[assignment]


# -- errors ---------------------------------------------------------------------------------------------------------------


def _say_call(model: nn.Module, batch: Batch) -> str:
    stars = "**" if isinstance(batch, Mapping) else "*" if isinstance(batch, (tuple, list)) else ""
    return f"{type(model).__name__}({stars}batch)"


def _explain_trace_error(error: Exception, call: str, batch: Batch) -> str:
    if isinstance(error, RuntimeError) and "does not require grad" in str(error):
        return (
            f"The loss does not depend on a parameter that is trained: {_say(error)} Give loss_fn= if the model's output has no "
            "loss, and do not compute the loss under torch.no_grad()."
        )
    reads_values = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
    if reads_values or re.search(r"numpy\(\)|data pointer|FakeTensor", str(error)):
        return (
            f"The model cannot be traced without data: {call} raised {_say(error)} It must not depend on the values of tensors, "
            "as by .item(), .numpy(), a comparison in an if, or a mask that selects rows."
        )
    named = batch.items() if isinstance(batch, Mapping) else enumerate(tensors_of(batch))
    shapes = ", ".join(f"{name}: {tuple(one.shape)}" for name, one in named if isinstance(one, torch.Tensor))
    advice = (
        "loss_fn is called with the model and the batch, and returns the loss"
        if call.startswith("loss")
        else "give a batch such as the model takes, or loss_fn=, a function of the model and the batch, if it is called otherwise"
    )
    return f"The model cannot be traced: {call} raised {_say(error)} The micro-batch has {shapes}: {advice}."


def _explain_step_error(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    name = type(optimizer).__name__
    if "closure" in inspect.signature(optimizer.step).parameters and "closure" in str(error):
        return (
            f"{name} computes the loss several times in a step, by a closure, so that its memory cannot be planned: give an "
            "optimizer whose step() needs no closure, such as torch.optim.AdamW."
        )
    return (
        f"{name} cannot make a step without data: {_say(error)} Its step() must not depend on the values of gradients; give "
        "optimizer_fn= an optimizer with a state of the same size, such as torch.optim.AdamW."
    )


def _say(error: Exception) -> str:
    first = str(error).split("\n")[0].strip()
    return f"{type(error).__name__}{': ' * bool(first)}{first}{'' if first.endswith(('.', '!')) else '.'}"


# -- batches --------------------------------------------------------------------------------------------------------------


def count_rows(batch: Batch) -> int:
    """Return the first dimension of a batch's tensors.

    Raises:
        ConfigError: The batch has no tensors or shapes, they differ in their first dimension, or it is 0.
    """
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch, is_leaf=_is_shape)
    shapes = [one if _is_shape(one) else getattr(one, "shape", ()) for one in leaves]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1:
        found = f"first dimensions {sorted(sizes)}" if sizes else "neither tensors nor shapes"
        raise ConfigError(
            f"batch has {found}; give a dict or tuple of tensors or shapes with one first dimension: its rows."
        )
    if not (rows := int(sizes.pop())):
        raise ConfigError("batch has 0 rows; give the rows of one optimizer step, 1 or more.")
    return rows


def make_batch(batch: Batch, num_rows: int, float_dtype: torch.dtype | None) -> Batch:
    """Make a batch of fake tensors with so many rows; shapes become int64 tensors, and floats may get another dtype."""

    def make(one: Any) -> Any:
        if _is_shape(one):
            return torch.empty((num_rows, *one[1:]), dtype=torch.int64)
        if not hasattr(one, "shape"):
            return one
        dtype = one.dtype if isinstance(one, torch.Tensor) else torch.from_numpy(one[:0]).dtype
        dtype = float_dtype if float_dtype is not None and dtype.is_floating_point else dtype
        return torch.empty((num_rows, *one.shape[1:]) if one.shape else (), dtype=dtype)

    return tree_map(make, dict(batch) if isinstance(batch, Mapping) else batch, is_leaf=_is_shape)


def compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Call the model with the batch and return the loss of its output; the sum of its first tensor where it has none."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        loss._raysgd_output = out  # type: ignore[attr-defined]  # which is in the loop's scope until the backward pass ends
        return loss
    if not (tensors := tensors_of(out)):
        raise TypeError(
            f"the model returned {type(out).__name__}, in which there is neither a loss nor another tensor."
        )
    return tensors[0] if tensors[0].dim() == 0 else tensors[0].sum()


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) or (
        isinstance(value, (tuple, list)) and len(value) > 0 and all(type(one) is int for one in value)
    )
