"""Follows the bytes and the FLOPs of a training step on fake tensors, operation by operation.

The tensors are torch's FakeTensors: shapes, dtypes and lifetimes are those of a real step, and there is no data. Storages
are counted from the operation that makes them until they are freed, so that views cost nothing and what autograd saves is
exactly what stays.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from raysgd.engine.planning.layout import Kind
from raysgd.engine.planning.profile import Amount, Segment, Side, find_highest

_ATEN = torch.ops.aten
_MATMULS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm}
_WEIGHT_PRODUCTS = _MATMULS | {_ATEN.embedding, _ATEN.convolution}
_WEIGHT_GRADIENTS = {_ATEN.mm, _ATEN.bmm, _ATEN.embedding_dense_backward, _ATEN.add, _ATEN.t, _ATEN.clone}
_ATTENTION_ON_CPU = _ATEN._scaled_dot_product_flash_attention_for_cpu


class SegmentTrace:
    """Measurements of one segment while it runs; `finish` makes the record."""

    def __init__(self, block: int | None) -> None:
        self.block = block
        self.is_stand_in = False
        self.first_serial = 0
        self.start = self.end = self.resumed = self.output = Amount()
        self.outputs: list[int] = []
        self.copies: list[int] = []
        self.weight_copies = Amount()
        self.states: tuple[list[Amount], list[Amount]] = ([], [])
        self.flops = [Amount(), Amount()]
        self.kernels = [0, 0]
        self.reduced = [0, 0]

    def finish(self) -> Segment:
        self.resumed = self.states[1][0] if self.states[1] else self.end
        return Segment(
            block=self.block,
            retained=self.end.minus(self.start),
            output=self.output,
            weight_copies=self.weight_copies,
            forward_peaks=find_highest([state.minus(self.start) for state in self.states[0]]),
            carried=self.resumed.minus(self.end),
            backward_peaks=find_highest([state.minus(self.resumed) for state in self.states[1]]),
            forward_flops=self.flops[0],
            backward_flops=self.flops[1],
            forward_kernels=self.kernels[0],
            backward_kernels=self.kernels[1],
            forward_reduced_bytes=self.reduced[0],
            backward_reduced_bytes=self.reduced[1],
        )


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs which storages a step makes and frees, and how tensor parallelism would divide them.

    Whether tensor parallelism shards a tensor follows from the weights. A product with a column-parallel weight shards its
    output, a product of a sharded tensor with a row-parallel weight is whole again, the backward pass mirrors both, and
    every other operation keeps what it finds (Shoeybi et al., Megatron-LM, 2019, section 3).

    Args:
        weights: The parameters.
        known: Buffers and the batch, which are not activations either.
        kinds: How weights are sharded, by the key of their storage.
        segment: Where the step begins.

    Attributes:
        in_backward: Whether the backward pass has started.
        segment: The segment that runs.
        sides: Where parameters outside the blocks were used, by the key of their storage.
        is_mismatched: Whether a column-parallel weight met a sharded tensor, or a row-parallel weight a whole one.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        known: Iterable[torch.Tensor],
        kinds: dict[int, Kind],
        segment: SegmentTrace,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.segment = segment
        self.sides: dict[int, set[Side]] = {}
        self.is_mismatched = False
        self._kinds = kinds
        self._is_first_side = True
        # The references keep the keys of known storages unique; those of activations are reused, so these have serials.
        self._weights = {key_of(tensor): tensor for tensor in weights}
        self._known = {**self._weights, **{key_of(tensor): tensor for tensor in known}}
        self._serials: dict[int, int] = {}
        self._parts: list[Amount] = []
        self._gradients: set[int] = set()
        self._inputs: set[int] = set()
        self._uses: dict[int, int] = {}
        self._last_op_is_divided = False
        self._backward_start = 0
        self._log: list[tuple[SegmentTrace, int, Amount, Amount]] = []
        self._marks: list[tuple[int, str, SegmentTrace]] = [(0, "start", segment)]

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return self._part(key_of(tensor)).sharded > 0

    def start_segment(self, segment: SegmentTrace) -> None:
        """End the forward pass of a segment and start the next one."""
        self.finish_forward()
        self._mark("start", segment)
        self.segment = segment
        segment.first_serial = len(self._parts)
        self._is_first_side = self._is_first_side and segment.block is None

    def finish_forward(self) -> None:
        """End the forward pass of the segment that runs."""
        self._mark("end", self.segment)

    def start_backward(self) -> None:
        """End the forward pass of the step; its last segment is the first one of the backward pass."""
        self.finish_forward()
        self._backward_start = len(self._log)
        self.in_backward = True
        self.resume_segment(self.segment)

    def resume_segment(self, segment: SegmentTrace) -> None:
        """Enter the backward pass of a segment."""
        self._mark("resume", segment)
        self.segment = segment

    def note_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what a block was called with: outputs of earlier blocks that stay with activation checkpointing."""
        self._inputs.update(self._serials[key] for key in map(key_of, tensors) if key in self._serials)

    def note_outputs(self, segment: SegmentTrace, tensors: list[torch.Tensor]) -> None:
        """Note what a block returned; the first tensor is its output."""
        serials = [self._serials[key] for key in map(key_of, tensors) if key in self._serials]
        segment.outputs = [one for one in dict.fromkeys(serials) if one >= segment.first_serial]
        self._inputs.update(serials[:1])

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Note that a tensor is the gradient of a parameter, not an activation."""
        if (serial := self._serials.get(key_of(gradient))) is not None:
            self._gradients.add(serial)

    def replay(self) -> None:
        """Compute what was in memory from the log, without the gradients of parameters."""
        live = Amount()
        alive: set[int] = set()
        marks = iter(self._marks)
        position, kind, marked = next(marks, (math.inf, "", self.segment))
        for index in range(len(self._log) + 1):
            while position <= index:
                self._apply_mark(kind, marked, live, alive)
                position, kind, marked = next(marks, (math.inf, "", marked))
            if index == len(self._log):
                break
            segment, serial, old, new = self._log[index]
            if serial in self._gradients:
                continue
            (alive.add if any(new) else alive.discard)(serial)
            live = live.minus(old).plus(new)
            if any(new):
                segment.states[int(index >= self._backward_start)].append(live)

    def _apply_mark(self, kind: str, segment: SegmentTrace, live: Amount, alive: set[int]) -> None:
        if kind == "start":
            segment.start = live
            segment.states[0].append(live)
        elif kind == "resume":
            segment.states[1].append(live)
        else:
            segment.end = live
            segment.output = _total(self._parts[one] for one in segment.outputs if one in alive and one in self._inputs)
            segment.weight_copies = _total(self._parts[one] for one in segment.copies if one in alive)

    def _mark(self, kind: str, segment: SegmentTrace) -> None:
        self._marks.append((len(self._log), kind, segment))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if results := list(_tensors(out)):
            op = func.overloadpacket
            self._count(op, [key_of(tensor) for tensor in _tensors((args, kwargs))], results)
            if flops := _flops_of(op, args, kwargs, out):
                self._add_flops(flops)
        return out

    def _count(self, op: Any, keys: list[int], results: list[torch.Tensor]) -> None:
        phase, segment = int(self.in_backward), self.segment
        if not self.in_backward:
            self._note_uses(op, keys)
        is_sharded, is_reduced = self._find_sharding(op, keys, results)
        is_copy = op is _ATEN._to_copy and not self.in_backward and keys[0] in self._weights
        made = [tensor for tensor in results if (key := key_of(tensor)) not in self._serials and key not in self._known]
        for tensor in made:
            size = tensor.untyped_storage().nbytes()
            serial = self._add(tensor, Amount(sharded=size) if is_sharded else Amount(whole=size))
            if is_reduced:
                segment.reduced[phase] += size
            if is_copy:
                segment.copies.append(serial)
            if self.in_backward and op in _WEIGHT_GRADIENTS and self._is_shared_weight(tensor):
                self._gradients.add(serial)
        segment.kernels[phase] += bool(made)

    def _add_flops(self, flops: float) -> None:
        phase, segment = int(self.in_backward), self.segment
        amount = Amount(sharded=flops) if self._last_op_is_divided else Amount(whole=flops)
        segment.flops[phase] = segment.flops[phase].plus(amount)

    def _find_sharding(self, op: Any, keys: list[int], results: list[torch.Tensor]) -> tuple[bool, bool]:
        """Whether the results are sharded, and whether ranks add them up."""
        kinds = [self._kinds[key] for key in keys if key in self._kinds]
        is_sharded = any(self._part(key).sharded for key in keys)
        self._last_op_is_divided = is_sharded or bool(kinds)
        if kinds and op in _MATMULS:
            if "whole" in kinds:
                return False, False
            if not self.in_backward:
                self.is_mismatched = self.is_mismatched or ("column" in kinds) == is_sharded
                if "column" in kinds and not is_sharded:
                    self._note_gathered(keys)
            return not is_sharded, is_sharded
        if kinds and len(keys) == 1:  # a copy in another dtype or layout, as autocast makes it
            for tensor in results:
                if (key := key_of(tensor)) not in self._known:
                    self._kinds[key] = kinds[0]
            return kinds[0] != "whole", False
        return is_sharded, False

    def _note_gathered(self, keys: list[int]) -> None:
        for key in keys:
            part = self._part(key)
            if key not in self._kinds and part.whole:
                serial = self._serials[key]
                self._parts[serial] = moved = Amount(gathered=part.whole)
                self._log.append((self.segment, serial, part, moved))

    def _note_uses(self, op: Any, keys: list[int]) -> None:
        for key in keys:
            if key in self._known:
                if op in _WEIGHT_PRODUCTS:
                    self._uses[key] = self._uses.get(key, 0) + 1
                if self.segment.block is None:
                    self.sides.setdefault(key, set()).add("first" if self._is_first_side else "last")

    def _is_shared_weight(self, gradient: torch.Tensor) -> bool:
        """Whether a tensor is one of several gradients that autograd adds up for a weight that is used more than once."""
        shape = tuple(gradient.shape)
        shared = {tuple(self._known[key].shape) for key, count in self._uses.items() if count > 1}
        return shape in shared or shape[::-1] in shared

    def _part(self, key: int) -> Amount:
        serial = self._serials.get(key)
        return Amount() if serial is None else self._parts[serial]

    def _add(self, tensor: torch.Tensor, part: Amount) -> int:
        key, serial = key_of(tensor), len(self._parts)
        self._serials[key] = serial
        self._parts.append(part)
        self._log.append((self.segment, serial, Amount(), part))
        weakref.finalize(tensor.untyped_storage(), self._remove, key, serial).atexit = False
        return serial

    def _remove(self, key: int, serial: int) -> None:
        if self._serials.get(key) == serial:
            del self._serials[key]
            self._kinds.pop(key, None)
        self._log.append((self.segment, serial, self._parts[serial], Amount()))


def _total(amounts: Iterable[Amount]) -> Amount:
    total = Amount()
    for amount in amounts:
        total = total.plus(amount)
    return total


def key_of(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's storage while it exists."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if op is _ATTENTION_ON_CPU:
        return _attention_flops(args[0].shape, args[2].shape, args[1].shape[-2], products=1)
    if op is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        # Five products instead of two: scores again, and the gradients of the values, weights, queries and keys.
        return _attention_flops(args[1].shape, args[3].shape, args[2].shape[-2], products=2.5)
    formula: Callable[..., float] | None = flop_registry.get(op)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def _attention_flops(query: Any, value: Any, length: int, *, products: float) -> float:
    return float(2 * math.prod(query[:-1]) * length * (query[-1] + value[-1]) * products)
