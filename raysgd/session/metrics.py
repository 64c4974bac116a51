"""Checks and copies the metrics of a report at the moment of the call. Runs in the training thread.

Reading a scalar on a device here would make the training thread wait for the device. Such a scalar becomes a `Deferred`,
which the stream's thread reads.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from raysgd._util.imports import imported
from raysgd._util.json import encode
from raysgd._util.text import with_article
from raysgd.errors import MetricError
from raysgd.result import AUTOMATIC_KEYS, DATA_WAIT_FRACTION

if TYPE_CHECKING:
    from raysgd.session.media import Image

MAX_METRICS_BYTES = 1 << 20
_SMALL = frozenset({float, bool, type(None)})
_NAMES = frozenset({str})
_TAKEN_KEYS = AUTOMATIC_KEYS | {DATA_WAIT_FRACTION}
_MAX_DEPTH = 20
#: The module of images and histograms, which every driver would import otherwise.
_MEDIA = "raysgd.session.media"
_SMALL_INT = 1 << 63
#: Size in bits of the longest int that Python reads from digits: 4300 of them.
_MAX_INT_BITS = 14_284
_JAX_VARIABLES = ("MutableArray", "Ref")
#: Prefixes of the TensorFlow and JAX dtypes that hold real numbers: not strings, complex numbers or generator keys.
_NUMBERS = ("float", "bfloat", "int", "uint", "bool")
#: The size is estimated from the numbers of characters and values; JSON takes up to this many times as much.
_UNDERESTIMATE = 12
#: Scalars of a device that may be on their way at once without a wait: as many as CUDA queues operations, and more.
NUM_SLOTS = 2048
_SLOT_BYTES = 8
#: Seconds between two questions whether a device has copied a scalar.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.0001, 0.002


class Deferred:
    """A scalar on a device that is read later."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def read(self) -> Any:
        """Return the number; waits for the device."""
        return self._read()


def copy_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``metrics`` in plain types.

    Raises:
        MetricError: A key is one that raysgd sets itself, a value is not a metric, or the metrics are larger than 1 MiB.
    """
    copied = {}
    size = 8 * len(metrics)
    for key, value in metrics.items():
        kind = type(value)
        if kind not in _SMALL and not (kind is int and -_SMALL_INT < value < _SMALL_INT):
            value, cost = _copy(str(key), value, 0)
            size += cost
        copied[key] = value
    if not _TAKEN_KEYS.isdisjoint(copied):
        taken = sorted(_TAKEN_KEYS.intersection(copied))
        raise MetricError(f"raysgd sets {', '.join(taken)} itself; give your metric another name.", key=taken[0])
    if not {*map(type, copied)} <= _NAMES:
        key = next(key for key in copied if type(key) is not str)
        raise MetricError(
            f"report() got the name {key!r}, {with_article(type(key).__name__)}; give a string.", key=str(key)
        )
    size += len("".join(copied))
    if size * _UNDERESTIMATE > MAX_METRICS_BYTES:
        _check_size(copied, size)
    return copied


def read_deferred(value: Any, keep: Callable[[Image], None] = lambda image: None) -> Any:
    """Return ``value`` with every `Deferred` in it read, and every image replaced by its text.

    Args:
        value: Metrics, or a part of them.
        keep: Gets each image.
    """
    kind = type(value)
    if kind is Deferred:
        return value.read()
    if kind is dict:
        return {key: read_deferred(item, keep) for key, item in value.items()}
    if kind is list:
        return [read_deferred(item, keep) for item in value]
    if kind.__module__ == _MEDIA:
        keep(value)
        return value.text
    return value


def has_deferred(value: Any) -> bool:
    """Return whether ``value`` contains what `read_deferred` reads or replaces."""
    kind = type(value)
    if kind is dict:
        return any(map(has_deferred, value.values()))
    return any(map(has_deferred, value)) if kind is list else kind is Deferred or kind.__module__ == _MEDIA


def _copy(key: str, value: Any, depth: int) -> tuple[Any, int]:
    """Return a plain copy of ``value``, and about how many bytes it takes as JSON."""
    kind = type(value)
    if kind in _SMALL:
        return value, 8
    if kind is int:
        return value, 8 if -_SMALL_INT < value < _SMALL_INT else _int_size(key, value)
    if kind is str:
        return value, len(value)
    if depth >= _MAX_DEPTH:
        raise MetricError(
            f"report({key}=...) is nested more than {_MAX_DEPTH} levels deep, or contains itself: report a flat dict.",
            key=key,
        )
    if isinstance(value, Mapping):
        return _copy_mapping(key, value, depth)
    if isinstance(value, (list, tuple)):
        copies = [_copy(f"{key}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        return [copied for copied, _ in copies], sum(cost for _, cost in copies)
    if isinstance(value, float):  # a subclass, such as np.float64
        return float(value), 8
    if isinstance(value, (int, str)):  # the same: IntEnum, ...
        return _copy(key, _base_value(value), depth)
    scalar = _copy_scalar(value)
    if scalar is None:
        raise MetricError(f"report({key}=...) got {_describe(value)}, not a metric; {_advice(value)}.", key=key)
    return (scalar[0], 8) if has_deferred(scalar[0]) else _copy(key, scalar[0], depth)


def _copy_mapping(key: str, value: Mapping[Any, Any], depth: int) -> tuple[dict[str, Any], int]:
    copied, size = {}, 0
    for name, item in value.items():
        if not isinstance(name, str):
            raise MetricError(f"report({key}=...) contains the name {name!r}; give a string.", key=key)
        copied[name], cost = _copy(f"{key}[{name!r}]", item, depth + 1)
        size += cost + len(name)
    return copied, size


def _base_value(value: Any) -> Any:
    return int(value) if isinstance(value, int) else str.__str__(value)


def _int_size(key: str, value: int) -> int:
    bits = value.bit_length()
    if bits > _MAX_INT_BITS:
        raise MetricError(
            f"report({key}=...) got an int of {bits:,} bits; up to 4300 digits can be read back: report a number made of it.",
            key=key,
        )
    return bits // 4


def _check_size(copied: dict[str, Any], estimate: int) -> None:
    size = max(estimate, _json_size(copied))
    if size > MAX_METRICS_BYTES:
        largest = max(copied, key=lambda key: len(key) + _json_size(copied[key]))
        raise MetricError(
            f"report() got about {size / 2**20:.1f} MiB of metrics, most of it in {_cut(largest)!r}; the limit is 1 MiB: "
            "keep large things with raysgd.save_checkpoint.",
            key=largest,
        )


def _cut(name: str) -> str:
    return name if len(name) <= 100 else name[:97] + "..."


def _json_size(value: Any) -> int:
    return len(encode(_without_deferred(value)))


def _without_deferred(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _without_deferred(item) for key, item in value.items()}
    if kind is list:
        return [_without_deferred(item) for item in value]
    return 0.0 if kind is Deferred else value.text if kind.__module__ == _MEDIA else value


def _copy_scalar(value: Any) -> tuple[Any] | None:
    """Return the copy of a framework's scalar, an image or a histogram in a 1-tuple; None if it is nothing of these."""
    if type(value).__module__ == _MEDIA:
        return (value if hasattr(value, "to_png") else value.text,)
    module = type(value).__module__.partition(".")[0]
    if getattr(value, "shape", None) not in ((), None) and tuple(value.shape) != ():
        return None
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return None if value.is_complex() else (_copy_torch(torch, value),)
    if module == "numpy" and hasattr(value, "item"):
        item = value.item()
        return (item,) if type(item) in _SMALL or type(item) in (int, str) else None
    if module in ("tensorflow", "jax", "jaxlib") and not _holds_number(value):
        return None
    if module == "tensorflow":  # a variable's value now; a tensor is immutable: holding it is a copy
        tensor = value.read_value() if hasattr(value, "read_value") else value
        return (Deferred(lambda: tensor.numpy().item()),)
    if module in ("jax", "jaxlib"):
        array = value[...] if type(value).__name__ in _JAX_VARIABLES else value
        return (Deferred(_copy_jax(array).item),)
    if module == "keras" and hasattr(value, "value"):  # a variable of one of the above, such as a learning rate
        return _copy_scalar(value.value)
    return None


def _holds_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is None or str(getattr(dtype, "name", dtype)).startswith(_NUMBERS)


def _copy_jax(array: Any) -> Any:
    """Queue a copy of an array on its device: a later step may donate the array itself, which deletes it."""
    jax = imported("jax")
    if jax is None or not isinstance(array, jax.Array):
        return array
    return _compiled_copy(jax)(array.addressable_data(0))  # each process that reports has its own


@functools.cache
def _compiled_copy(jax: Any) -> Callable[[Any], Any]:
    return cast("Callable[[Any], Any]", jax.jit(jax.numpy.copy))


def _copy_torch(torch: Any, tensor: Any) -> Any:
    if tensor.device.type == "cpu":
        return tensor.item()
    if tensor.device.type != "cuda":
        return Deferred(tensor.detach().clone().item)
    if (slots := _slots.get(tensor.device)) is None:
        slots = _slots.setdefault(tensor.device, CopySlots(torch, torch.cuda.Event, is_pinned=True))
    return slots.copy(tensor.detach().resolve_neg(), torch.cuda.current_stream(tensor.device))


class CopySlots:
    """Copies scalars of one device to the host, without ever waiting for the device in the thread that copies.

    Allocating pinned memory may wait for all queued work. So slots are made ahead, and used again once they are read. A slot
    has an event that is not a blocking one: a loop that runs ahead of the device was held by recording those.

    Args:
        make_event: Makes an event with ``record`` and ``query``.
        is_pinned: The memory is pinned.
    """

    def __init__(self, torch: Any, make_event: Callable[[], Any], *, is_pinned: bool) -> None:
        self._torch = torch
        self._make_event = make_event
        self._is_pinned = is_pinned
        self._free: deque[tuple[Any, Any]] = deque()
        self._make_slots()

    def copy(self, scalar: Any, stream: Any) -> Deferred:
        """Queue the copy of ``scalar`` on ``stream``, behind what computes it and before what changes it.

        Another thread that queued the copy when it reads would wait for all steps that were queued meanwhile.
        """
        if not self._free:  # more copies are unread than a device queues, such as with several scalars in each report
            self._make_slots()
        slot = self._free.popleft()
        memory, copied = slot
        host = memory.view(scalar.dtype)[0]
        host.copy_(scalar, non_blocking=True)
        copied.record(stream)
        values: list[Any] = []  # the slot is used again after the first read

        def read() -> Any:
            if not values:
                _wait_for(copied)
                values.append(host.item())
                self._free.append(slot)
            return values[0]

        return Deferred(read)

    def _make_slots(self) -> None:
        memory = self._torch.empty(NUM_SLOTS, _SLOT_BYTES, dtype=self._torch.uint8, pin_memory=self._is_pinned)
        self._free.extend((slot, self._make_event()) for slot in memory.unbind())


#: By device.
_slots: dict[Any, CopySlots] = {}


def _wait_for(event: Any) -> None:
    """Wait by asking now and then: to wait in CUDA takes a core, or an event that holds the thread which records it."""
    pause_s = _FIRST_PAUSE_S
    while not event.query():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"a {name}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _advice(value: Any) -> str:
    if getattr(value, "shape", None) is not None:
        return "report a number made of it (.mean(), .item()), or keep it with raysgd.save_checkpoint"
    plain = "metrics are numbers, strings, bools, None, and small lists and dicts of them"
    return f"{plain}; keep objects with raysgd.save_checkpoint"
