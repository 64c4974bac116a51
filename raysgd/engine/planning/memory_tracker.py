"""Follows a training step on fake tensors: the storages that it makes and frees, and what tensor parallelism does to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

#: What tensor-parallel ranks have of a storage: the whole, as between blocks; the whole also with sequence parallelism, as the
#: inputs of column-parallel layers; or a shard. Gradients of parameters are not activations.
_WHOLE, _GATHERED, _SHARDED, _GRADIENT = range(4)
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm}
_OF_GRADIENTS = {_ATEN.mm, _ATEN.bmm, _ATEN.embedding_dense_backward, _ATEN.add, _ATEN.t, _ATEN.clone}


def _of_shapes(formula: Any, count: int) -> Any:
    return lambda *args, **_: formula(*(one.shape for one in args[:count]))


#: Torch's formulas, and those of attention on a CPU, which it does not have.
_FLOPS: dict[Any, Any] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _of_shapes(sdpa_flop_count, 3),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _of_shapes(sdpa_backward_flop_count, 4),
}


class Level(NamedTuple):
    """What a segment of the step, a block or what lies between stacks of blocks, adds in bytes on one rank.

    Attributes:
        block: Index of the block; None outside the blocks.
        kept: What stays between its forward and its backward pass.
        output: What it returns, which stays with activation checkpointing too.
        forward_peak: The highest level of its forward pass, relative to its start.
        carried: What its backward pass finds in addition to what was there at the end of its forward pass.
        backward_peak: The highest level of its backward pass, relative to its start.
        gradients: Gradients of parameters that its backward pass leaves.
    """

    block: int | None
    kept: float
    output: float
    forward_peak: float
    carried: float
    backward_peak: float
    gradients: float


@dataclass
class _Segment:
    """A segment: its forward and backward parts as ranges of events, the storages that it returns, and its work."""

    block: int | None
    parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    outputs: list[int] = field(default_factory=list)
    flops: float = 0
    kernels: int = 0


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs the storages of a step from the operation that makes them until they are freed, so that views cost nothing.

    Whether tensor parallelism shards a storage follows from the weights: a product with a column-parallel weight is sharded, the
    product of that with a row-parallel weight is whole again, the backward pass mirrors both, and every other operation keeps
    what it finds (Shoeybi et al., Megatron-LM, 2019, section 3).

    Args:
        known: Parameters, buffers and the batch, which are not activations.
        kinds: How weights are sharded, by the key of their storage: ``"column"``, ``"row"`` or ``"whole"``.
        tied: Shapes of weights that several layers have: one of their gradients waits for the others.

    Attributes:
        segments: Those of the step, in forward order.
        now: The index of the one that runs.
    """

    def __init__(
        self, known: Iterable[torch.Tensor], kinds: dict[int, str], tied: Iterable[tuple[int, ...]] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[_Segment] = [_Segment(None)]
        self.now = 0
        self._phase, self._since = 0, 0
        self._known = {key_of(tensor): tensor for tensor in known}  # held, so that no other storage gets their keys
        self._weight_kinds = kinds
        self._tied = {each for shape in tied for each in (shape, shape[::-1])}
        self._serials: dict[int, int] = {}
        # Of each storage: bytes, kind, whether it is a weight in another type, and the segment that made it.
        self._storages: list[list[int]] = []
        self._events: list[tuple[int, int]] = []

    def enter(self, segment: int, *, is_backward: bool = False) -> None:
        """End the part of the step that runs, and begin one of another segment, or of the same."""
        self.segments[self.now].parts[self._phase].append((self._since, len(self._events)))
        self.now, self._phase, self._since = segment, int(is_backward), len(self._events)

    def begin(self, block: int | None) -> int:
        """Begin a new segment, and return its index."""
        self.segments.append(_Segment(block))
        self.enter(len(self.segments) - 1)
        return self.now

    def note_outputs(self, tree: Any) -> None:
        """Note what a block, the segment that runs, returned."""
        serials = {self._serials.get(key_of(one), -1) for one in tensors_of(tree)} - {-1}
        self.segments[self.now].outputs = [one for one in serials if self._storages[one][3] == self.now]

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Note that a tensor is the gradient of a parameter."""
        if (serial := self._serials.get(key_of(gradient))) is not None:
            self._storages[serial][1] = _GRADIENT

    def levels(self, tensor_parallel: int, *, sequence_parallel: bool, has_copies: bool) -> list[Level]:
        """Return what each segment adds on one of the tensor-parallel ranks; without ``has_copies`` autocast copies no weight."""
        whole_sizes, kinds, copies, makers = np.array(self._storages, float).reshape(-1, 4).T
        is_divided = kinds == _SHARDED
        if sequence_parallel:
            in_blocks = np.array([one.block is not None for one in self.segments])[makers.astype(int)]
            is_divided = is_divided | ((kinds == _WHOLE) & in_blocks)
        is_activation = (kinds != _GRADIENT) & (has_copies | (copies == 0))
        each = np.where(is_divided, whole_sizes / tensor_parallel, whole_sizes)
        serials, signs = np.array(self._events, int).reshape(-1, 2).T
        sizes = np.where(is_activation, each, 0)
        level = np.concatenate([[0.0], np.cumsum(sizes[serials] * signs)])
        left = np.concatenate([[0.0], np.cumsum(np.where(kinds == _GRADIENT, each, 0)[serials] * signs)])
        found = []
        for one in self.segments:
            begin, end = one.parts[0][0]
            backward = one.parts[1] or [(end, end)]
            resumed = level[backward[0][0]]
            found.append(
                Level(
                    block=one.block,
                    kept=level[end] - level[begin],
                    output=float(sizes[one.outputs].sum()),
                    forward_peak=level[begin : end + 1].max() - level[begin],
                    carried=resumed - level[end],
                    backward_peak=max(level[first : last + 1].max() for first, last in backward) - resumed,
                    gradients=sum(left[last] - left[first] for first, last in backward),
                )
            )
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, op, segment = func(*args, **(kwargs := kwargs or {})), func.overloadpacket, self.segments[self.now]
        keys, results = [key_of(one) for one in tensors_of((args, kwargs))], tensors_of(out)
        kind = self._find_kind(op, keys, results)
        is_copy = op is _ATEN._to_copy and self._phase == 0 and isinstance(self._known.get(keys[0]), nn.Parameter)
        made = {key: one for one in results if (key := key_of(one)) not in self._serials and key not in self._known}
        for key, tensor in made.items():
            serial = self._serials[key] = len(self._storages)
            is_gradient = self._phase == 1 and op in _OF_GRADIENTS and tuple(tensor.shape) in self._tied
            own = _GRADIENT if is_gradient else kind
            self._storages.append([tensor.untyped_storage().nbytes(), own, is_copy, self.now])
            self._events.append((serial, 1))
            weakref.finalize(tensor.untyped_storage(), self._remove, key, serial).atexit = False
        segment.kernels += bool(made)
        segment.flops += _FLOPS[op](*args, **kwargs, out_val=out) if op in _FLOPS else 0
        return out

    def _find_kind(self, op: Any, keys: list[int], results: list[torch.Tensor]) -> int:
        weights = {self._weight_kinds[key] for key in keys if key in self._weight_kinds}
        storages = [self._storages[self._serials[key]] for key in keys if key in self._serials]
        is_sharded = any(one[1] == _SHARDED for one in storages)
        if weights and op in _PRODUCTS:
            if "whole" in weights:
                return _WHOLE
            for one in storages if "column" in weights and not is_sharded and self._phase == 0 else ():
                one[1] = _GATHERED
            return _WHOLE if is_sharded else _SHARDED
        if weights and len(keys) == 1:  # a weight in another type or layout, as autocast makes it
            (kind,), is_sharded = weights, "whole" not in weights
            self._weight_kinds |= {key: kind for one in results if (key := key_of(one)) not in self._known}
        return _SHARDED if is_sharded else _WHOLE

    def _remove(self, key: int, serial: int) -> None:
        if self._serials.get(key) == serial:
            del self._serials[key]
            self._weight_kinds.pop(key, None)
        self._events.append((serial, -1))


def key_of(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's storage while it exists."""
    return int(tensor.untyped_storage()._cdata)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_FP32_ON_CUDA = {
    getattr(owner, name, None)
    for owner in (torch, torch.Tensor, nn.functional)
    for name in (
        "layer_norm", "group_norm", "softmax", "log_softmax", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
        "cosine_similarity", "pow", "rsqrt", "exp", "log", "norm", "cumsum", "prod", "softplus",
    )
}  # fmt: skip


class AsOnCuda(TorchFunctionMode):
    """Replaces what saves other tensors on a GPU than on a CPU, where fake tensors without CUDA have to be.

    Attention keeps queries, keys, values, outputs and one number for each row of scores, with dropout too (Dao et al.,
    FlashAttention, 2022; torch's memory-efficient kernel does the same in fp32). Dropout keeps a mask of one byte for each
    element. Autocast computes norms, softmax and losses in fp32 on CUDA ("CUDA Ops that can autocast to float32" in torch's
    documentation of ``torch.amp``), but the log-softmax of a cross-entropy in the type of the logits: ATen's LossNLL.cpp names
    that type, which autocast then leaves as it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_autocast = kwargs or {}, torch.is_autocast_enabled("cpu")
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in (nn.functional.dropout, torch.dropout):
            return _drop(*args, **kwargs)
        if func is nn.functional.cross_entropy and is_autocast:
            return _compute_cross_entropy(*args, **kwargs)
        if func in _FP32_ON_CUDA and is_autocast:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda one: one.float() if one.is_floating_point() else one, (args, kwargs)
            )
        return func(*args, **kwargs)


def _attend(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
    mask = attn_mask.to(q.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, *args, **kwargs)


def _compute_cross_entropy(input: Any, target: Any, *args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        if target.is_floating_point() or label_smoothing:
            return nn.functional.cross_entropy(input, target, *args, **{**kwargs, "label_smoothing": label_smoothing})
        logs = torch.log_softmax(input, min(1, input.dim() - 1))
        return nn.functional.nll_loss(logs.float(), target, *args, **kwargs)


def _drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Any:
    return torch.native_dropout(input, p, True)[0] if training and train and p > 0 else input
