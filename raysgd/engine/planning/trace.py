"""Traces a model's training step on fake tensors: what it holds in memory, and how much it computes.

The model is built on the meta device; nothing is allocated and nothing is computed. It needs neither Ray nor a process
group. Blocks that are built alike are traced twice and stand for each other, so that a deep model takes as long as a
shallow one.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from raysgd.engine.config import Precision
from raysgd.engine.planning.layout import Layout, find_layout
from raysgd.engine.planning.profile import ParameterInfo, Segment
from raysgd.engine.planning.tracker import SegmentTrace, StepTracker, key_of
from raysgd.errors import ConfigError

Batch = Any
LossFn = Callable[[nn.Module, Batch], torch.Tensor]
OptimizerFn = Callable[[Any], torch.optim.Optimizer]
DeviceType = Literal["cuda", "cpu"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A block is traced where it occurs first and second: masks and states that all blocks share count where they are first.
_TRACED_OCCURRENCES = 2


@dataclass(frozen=True)
class Step:
    """A traced step.

    Attributes:
        segments: The step in forward order.
        sides: Where parameters outside the blocks are used, by name.
        leaking_block: The first block whose layers are not pairs of column- and row-parallel layers, or None.
    """

    segments: tuple[Segment, ...]
    sides: Mapping[str, frozenset[Any]]
    leaking_block: str | None


class TracedModel:
    """A model on the meta device that can be traced for micro-batches of any size.

    Args:
        model_fn: Makes the model.
        batch: Tensors or shapes: a dict (passed as keyword arguments), a tuple (positional) or one tensor.
        loss_fn: Computes the loss of a model and a batch. None: the output's loss, or the sum of its first tensor.
        precision: As in `EngineConfig`.
        device: Where the step will run. Attention and dropout keep other tensors on a GPU than on a CPU.
        tensor_plan: The user's plan of tensor parallelism. With None or a function, the engine's own plan says how layers are
            sharded.

    Raises:
        ConfigError: The model cannot be built on the meta device or has no parameters to train, or the batch has no rows.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        batch: Batch,
        *,
        loss_fn: LossFn | None = None,
        precision: Precision = "fp32",
        device: DeviceType = "cuda",
        tensor_plan: Any = None,
    ) -> None:
        model = _build_on_meta(model_fn)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model_fn returned {type(model).__name__}; it has to return a torch.nn.Module.")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = torch.bfloat16 if precision == "bf16-true" else None
        with self._mode:
            _replace_by_fakes(model, dtype)
        self.model = model.train()
        self.layout: Layout = find_layout(model, tensor_plan)
        if next(model.parameters(), None) is None:
            raise ConfigError("The model has no parameters, so there is nothing to plan.")
        if not any(one.requires_grad for one in model.parameters()):
            raise ConfigError(
                "All parameters of the model are frozen (requires_grad=False), so there is nothing to train: unfreeze those "
                "that shall be trained, by parameter.requires_grad_(True)."
            )
        count_rows(batch)
        self._batch = batch
        self._loss_fn = loss_fn or compute_loss
        self._precision = precision
        self._device = device

    @property
    def num_rows(self) -> int:
        """Rows of the batch: the first dimension of its tensors."""
        return count_rows(self._batch)

    def describe_parameters(
        self, optimizer_fn: OptimizerFn, sides: Mapping[str, frozenset[Any]]
    ) -> tuple[ParameterInfo, ...]:
        """Describe all parameters, tied ones once, with what the optimizer keeps of each after its first step."""
        names = {parameter: name for name, parameter in reversed(list(self.model.named_parameters()))}
        kinds = self._kinds_by_first_name()
        states = self._find_state_bytes(list(names), optimizer_fn)
        blocks = {
            parameter: index for index, (_, block) in enumerate(self.layout.blocks) for parameter in block.parameters()
        }
        infos = []
        for parameter, name in reversed(names.items()):
            per_element, other = states.get(parameter, (0, 0))
            infos.append(
                ParameterInfo(
                    name=name,
                    shape=tuple(parameter.shape),
                    itemsize=parameter.element_size(),
                    master_itemsize=4 if self._precision == "bf16-true" and parameter.requires_grad else 0,
                    block=blocks.get(parameter),
                    sides=sides.get(name, frozenset()),
                    tensor_dim=kinds[name][1] if name in kinds else None,
                    is_trainable=parameter.requires_grad,
                    state_bytes_per_element=per_element,
                    state_bytes=other,
                )
            )
        return tuple(infos)

    def count_buffer_bytes(self) -> int:
        return sum({key_of(one): one.untyped_storage().nbytes() for one in self.model.buffers()}.values())

    def trace(self, num_rows: int) -> Step:
        """Trace the forward and the backward pass of a micro-batch.

        Raises:
            ConfigError: The model's code fails on fake tensors, for instance because it reads values.
        """
        with self._mode, contextlib.ExitStack() as stack:
            batch = make_batch(self._batch, num_rows, torch.bfloat16 if self._precision == "bf16-true" else None)
            kinds = {
                key_of(self.model.get_parameter(name)): kind for name, (kind, _) in self._kinds_by_first_name().items()
            }
            known = [*self.model.buffers(), *_tensors_of(batch)]
            tracker = StepTracker(self.model.parameters(), known, kinds, SegmentTrace(None))
            recorder = _Recorder(self.layout, tracker)
            stack.enter_context(recorder.attached())
            stack.enter_context(_discarded_gradients(self.model, recorder.tracker))
            if self._device == "cuda":
                stack.enter_context(_without_attention_dropout(self.model))
                stack.enter_context(_AsOnCuda())
            stack.enter_context(recorder.tracker)
            call = "loss_fn(model, batch)" if self._loss_fn is not compute_loss else _say_call(self.model, batch)
            try:
                with torch.autocast("cpu", _AUTOCAST.get(self._precision), enabled=self._precision in _AUTOCAST):
                    # The output lives until the backward pass has ended, as in a training loop.
                    loss = self._loss_fn(self.model, batch)
                recorder.start_backward()
                call = "loss.backward()"
                loss.backward()  # type: ignore[no-untyped-call]
            except Exception as error:
                raise ConfigError(_explain_trace_error(error, call, batch)) from error
            by_key = {key_of(parameter): name for name, parameter in self.model.named_parameters()}
            sides = {by_key[key]: frozenset(side) for key, side in recorder.tracker.sides.items() if key in by_key}
            return Step(recorder.finish(), sides, recorder.leaking_block)

    def _kinds_by_first_name(self) -> dict[str, Any]:
        first = {parameter: name for name, parameter in reversed(list(self.model.named_parameters()))}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        return {first[every[name]]: kind for name, kind in self.layout.kinds.items() if name in every}

    def _find_state_bytes(
        self, parameters: list[nn.Parameter], optimizer_fn: OptimizerFn
    ) -> dict[nn.Parameter, tuple[float, float]]:
        """Make one step of the optimizer on fake parameters, and sum what it keeps of each.

        With ``bf16-true`` the optimizer updates fp32 master weights, so that its state is in fp32 too.
        """
        has_masters = self._precision == "bf16-true"
        kinds = {
            one: (tuple(one.shape), torch.float32 if has_masters else one.dtype)
            for one in parameters
            if one.requires_grad
        }
        if not kinds:
            return {}
        with self._mode:
            copies = {kind: nn.Parameter(torch.empty(kind[0], dtype=kind[1])) for kind in kinds.values()}
            for copy in copies.values():
                copy.grad = torch.empty_like(copy)
            optimizer = optimizer_fn(list(copies.values()))
            try:
                optimizer.step()
            except Exception as error:
                raise ConfigError(_explain_step_error(optimizer, error)) from error
        sizes = {}
        for kind, copy in copies.items():
            kept = [one for one in tree_leaves(optimizer.state.get(copy, {})) if isinstance(one, torch.Tensor)]
            like = sum(one.element_size() for one in kept if one.shape == copy.shape and one.dim())
            other = sum(one.numel() * one.element_size() for one in kept if one.shape != copy.shape or not one.dim())
            sizes[kind] = (like, other)
        return {parameter: sizes[kind] for parameter, kind in kinds.items()}


def _build_on_meta(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Make a model on the meta device. Errors that are not due to this device are not changed."""
    try:
        with torch.device("meta"):
            return model_fn()
    except Exception as error:
        if not isinstance(error, NotImplementedError) and not re.search(r"\bmeta\b", str(error)):
            raise
        raise ConfigError(
            f"The model cannot be built without data: {_say(error)} model_fn runs on the meta device, where tensors have no "
            "values. It must not move the model (.to(), .cuda()), nor load weights; and where it reads numbers out of tensors "
            '(.item(), .tolist(), float()), compute them in Python, or by torch on device="cpu".'
        ) from error


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
    advice = (
        "loss_fn is called with the model and the batch, and returns the loss"
        if call.startswith("loss")
        else "give a batch such as the model takes, or loss_fn=, a function of the model and the batch, if it is called otherwise"
    )
    return (
        f"The model cannot be traced: {call} raised {_say(error)} The micro-batch has {_say_shapes(batch)}: {advice}."
    )


def _say_shapes(batch: Batch) -> str:
    named = batch.items() if isinstance(batch, Mapping) else enumerate(_tensors_of(batch))
    return ", ".join(f"{name}: {tuple(each.shape)}" for name, each in named if isinstance(each, torch.Tensor))


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
    lines = str(error).splitlines()
    first = lines[0].strip() if lines else ""
    return f"{type(error).__name__}{': ' * bool(first)}{first}{'' if first.endswith(('.', '!')) else '.'}"


class _Recorder:
    """Divides a step into segments: its hooks notice where blocks begin and end, in both passes."""

    def __init__(self, layout: Layout, tracker: StepTracker) -> None:
        self.tracker = tracker
        self.leaking_block: str | None = None
        self._segments = [tracker.segment]
        self._layout = layout
        self._last = {id(list(stack.values())[-1]) for stack in layout.stacks.values()}
        # By what a block is built like and called with: its segments so far, and what it returned.
        self._occurrences: dict[Any, list[SegmentTrace]] = {}
        self._returned: dict[Any, Any] = {}
        self._twins: dict[int, SegmentTrace] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Have the hooks on all blocks."""
        blocks = self._layout.blocks
        for index, (name, block) in enumerate(blocks):
            block.forward = self._wrap(index, name, block, block.forward)
        try:
            yield
        finally:
            for _, block in blocks:
                del block.forward

    def start_backward(self) -> None:
        self.tracker.start_backward()

    def finish(self) -> tuple[Segment, ...]:
        self.tracker.replay()
        finished = {id(one): one.finish() for one in self._segments if not one.is_stand_in}
        return tuple(replace(finished[id(self._twins.get(id(one), one))], block=one.block) for one in self._segments)

    def _wrap(self, index: int, name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        built_like = _describe_build(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = tree_flatten((args, kwargs))
            key = (built_like, tuple(map(_describe_leaf, leaves)))
            before, segment = self._segments[-1], SegmentTrace(index)
            self._segments.append(segment)
            self.tracker.start_segment(segment)
            self.tracker.note_inputs(_tensors_of(leaves))
            seen = self._occurrences.setdefault(key, [])
            segment.is_stand_in = len(seen) >= _TRACED_OCCURRENCES and id(block) not in self._last
            _mark(leaves, lambda: self._leave_backward(segment, before))
            if segment.is_stand_in:
                self._twins[id(segment)] = seen[_TRACED_OCCURRENCES - 1]
                out = _stand_in(self._returned[key], leaves)
            else:
                out = forward(*args, **kwargs)
                seen.append(segment)
                self._returned[key] = _describe_output(out, leaves)
            self._end_block(segment, name, block, out)
            return out

        return run

    def _end_block(self, segment: SegmentTrace, name: str, block: nn.Module, out: Any) -> None:
        outputs = _tensors_of(out)
        self.tracker.note_outputs(segment, outputs)
        is_leaking = self.tracker.is_mismatched or any(map(self.tracker.is_sharded, outputs[:1]))
        if self.leaking_block is None and is_leaking:
            self.leaking_block = name
        _mark(outputs, lambda: self.tracker.resume_segment(segment))
        # What the caller does between two blocks of a stack belongs to the first one.
        if id(block) in self._last:
            outside = SegmentTrace(None)
            self._segments.append(outside)
            self.tracker.start_segment(outside)

    def _leave_backward(self, segment: SegmentTrace, before: SegmentTrace) -> None:
        if self.tracker.segment is segment:
            self.tracker.resume_segment(before)


def _mark(leaves: list[Any], reached: Callable[[], None]) -> None:
    """Call a function when the gradient of the first tensor that has one is complete."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: reached())  # type: ignore[no-untyped-call]
            return


class _StandIn(torch.autograd.Function):
    """Returns tensors of given shapes that depend on the inputs, without computing or keeping anything."""

    @staticmethod
    def forward(ctx: Any, specs: list[tuple[Any, torch.dtype]], *inputs: torch.Tensor) -> Any:
        ctx.shapes = [(one.shape, one.dtype, one.requires_grad) for one in inputs]
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in specs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(torch.empty(shape, dtype=dtype) if needed else None for shape, dtype, needed in ctx.shapes)


def _describe_output(out: Any, leaves: list[Any]) -> Any:
    """Describe what a block returned: new tensors by shape, its inputs by position, all else as it is."""
    flat, tree = tree_flatten(out)
    inputs = {key_of(one): index for index, one in enumerate(leaves) if isinstance(one, torch.Tensor)}
    described: list[tuple[str, Any]] = []
    for leaf in flat:
        if not isinstance(leaf, torch.Tensor):
            described.append(("value", leaf))
        elif key_of(leaf) in inputs:
            described.append(("input", inputs[key_of(leaf)]))
        else:
            described.append(("new", (leaf.shape, leaf.dtype)))
    return described, tree


def _stand_in(returned: Any, leaves: list[Any]) -> Any:
    described, tree = returned
    specs = [value for kind, value in described if kind == "new"]
    made = iter(_StandIn.apply(specs, *_tensors_of(leaves)) if specs else ())  # type: ignore[no-untyped-call]
    flat = [next(made) if kind == "new" else leaves[value] if kind == "input" else value for kind, value in described]
    return tree_unflatten(flat, tree)


def _describe_build(block: nn.Module) -> Any:
    parameters = tuple((name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters())
    buffers = tuple((name, tuple(one.shape)) for name, one in block.named_buffers())
    return type(block), repr(block), parameters, buffers


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _replace_by_fakes(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace meta tensors by fake ones of the CPU; tied parameters stay tied."""
    made: dict[int, Any] = {}

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    copy = nn.Parameter(fake_of(parameter), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = (copy, parameter)
                module._parameters[name] = made[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = (fake_of(buffer), buffer)
                module._buffers[name] = made[id(buffer)][0]


@contextlib.contextmanager
def _discarded_gradients(model: nn.Module, tracker: StepTracker) -> Iterator[None]:
    """Drop each gradient of a parameter when it is complete: gradients are counted by shape, not as activations."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = [one for one in model.parameters() if one.requires_grad]
    handles = []
    for one in trained:
        handles.append(one.register_post_accumulate_grad_hook(drop))  # type: ignore[no-untyped-call]
        handles.append(one.register_hook(tracker.note_gradient))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _without_attention_dropout(model: nn.Module) -> Iterator[None]:
    """Set the dropout of ``nn.MultiheadAttention`` to 0: fused kernels keep nothing for it, those of the CPU cannot do it."""
    layers = [(one, one.dropout) for one in model.modules() if isinstance(one, nn.MultiheadAttention)]
    for layer, _ in layers:
        layer.dropout = 0.0
    try:
        yield
    finally:
        for layer, dropout in layers:
            layer.dropout = dropout


_FP32_ON_CUDA = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor, nn.functional)
    for name in (
        "layer_norm", "group_norm", "softmax", "log_softmax", "nll_loss", "mse_loss", "l1_loss",
        "smooth_l1_loss", "cosine_similarity", "pow", "rsqrt", "exp", "log", "norm", "cumsum", "prod", "softplus",
    )
    if hasattr(owner, name)
}  # fmt: skip


def _to_fp32(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.float() if one.is_floating_point() else one, tree)


class _AsOnCuda(TorchFunctionMode):
    """Replaces what saves other tensors on a GPU than on a CPU, where fake tensors without CUDA have to be.

    Attention keeps queries, keys, values, outputs and one number for each row of scores, with dropout too (Dao et al.,
    FlashAttention, 2022; torch's memory-efficient kernel does the same in fp32). Dropout keeps a mask of one byte for each
    element. Autocast computes norms, softmax and losses in fp32 on CUDA ("CUDA Ops that can autocast to float32" in torch's
    documentation of ``torch.amp``), but the log-softmax of a cross-entropy in the type of the logits: ATen's LossNLL.cpp names
    that type, which autocast then leaves as it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in (nn.functional.dropout, torch.dropout):
            return self._drop(*args, **kwargs)
        if func is nn.functional.cross_entropy and torch.is_autocast_enabled("cpu"):
            return self._compute_cross_entropy(*args, **kwargs)
        if func in _FP32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = _to_fp32(args), _to_fp32(kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    @staticmethod
    def _compute_cross_entropy(
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            if target.is_floating_point() or label_smoothing:
                return nn.functional.cross_entropy(
                    input, target, weight, None, ignore_index, None, reduction, label_smoothing
                )
            logs = torch.log_softmax(input, min(1, input.dim() - 1))
            return nn.functional.nll_loss(logs.float(), target, weight, None, ignore_index, None, reduction)

    @staticmethod
    def _drop(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and train and p > 0 else input


def count_rows(batch: Batch) -> int:
    """Return the first dimension of a batch's tensors.

    Raises:
        ConfigError: The batch has no tensors or shapes, they differ in their first dimension, or it is 0.
    """
    sizes = {shape[0] for shape in _shapes_of(batch) if shape}
    if len(sizes) != 1:
        found = f"first dimensions {sorted(sizes)}" if sizes else "neither tensors nor shapes"
        raise ConfigError(
            f"batch has {found}; give a dict or tuple of tensors or shapes with one first dimension: its rows."
        )
    if not (rows := int(sizes.pop())):
        raise ConfigError("batch has 0 rows; give the rows of one optimizer step, 1 or more.")
    return rows


def make_batch(batch: Batch, num_rows: int, float_dtype: torch.dtype | None = None) -> Batch:
    """Make a batch of fake tensors with another number of rows. Shapes become int64 tensors, as token ids are.

    Args:
        batch: A batch as of `TracedModel`.
        num_rows: Rows of the new batch.
        float_dtype: What tensors of floats become; None keeps their dtype.
    """
    if _is_shape(batch):
        return torch.empty((num_rows, *batch[1:]), dtype=torch.int64)
    if hasattr(batch, "shape"):
        dtype = batch.dtype if isinstance(batch, torch.Tensor) else torch.from_numpy(batch[:0]).dtype
        dtype = float_dtype if float_dtype is not None and dtype.is_floating_point else dtype
        return torch.empty((num_rows, *batch.shape[1:]) if batch.shape else (), dtype=dtype)
    if isinstance(batch, Mapping):
        return {key: make_batch(one, num_rows, float_dtype) for key, one in batch.items()}
    return tuple(make_batch(one, num_rows, float_dtype) for one in batch) if isinstance(batch, (tuple, list)) else batch


def compute_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Call the model with the batch and return the loss of its output; the sum of its first tensor where it has none."""
    out = (
        model(**batch)
        if isinstance(batch, Mapping)
        else model(*batch)
        if isinstance(batch, (tuple, list))
        else model(batch)
    )
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        # The output is in the training loop's scope until the backward pass has ended.
        loss._raysgd_output = out  # type: ignore[attr-defined]
        return loss
    tensors = _tensors_of(out)
    if not tensors:
        raise TypeError(
            f"the model returned {type(out).__name__}, in which there is neither a loss nor another tensor."
        )
    first = tensors[0]
    return first if first.dim() == 0 else first.sum()


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) or (
        isinstance(value, (tuple, list)) and len(value) > 0 and all(type(one) is int for one in value)
    )


def _shapes_of(batch: Batch) -> list[tuple[int, ...]]:
    if hasattr(batch, "shape"):
        return [tuple(batch.shape)]
    if _is_shape(batch):
        return [tuple(batch)]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return [shape for value in values for shape in _shapes_of(value)]


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
