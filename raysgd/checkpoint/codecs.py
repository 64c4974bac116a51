"""How built-in containers and scalars are written and read: closed tables, by exact type and by kind.

Exact types on purpose: a subclass (an enum, say) has meaning that its base would lose.
An encoder gets (encoder, value) and returns a node; a decoder gets (decoder, node) and returns the value.
"""

from __future__ import annotations

import base64
import collections
import datetime
import math
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from raysgd._util.wording import with_article
from raysgd.checkpoint import named_tuples
from raysgd.checkpoint.leaves import Leaf
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    from raysgd.checkpoint.tree import Decoder, Encoder

Json: TypeAlias = Any

_SMALL_INT = 1 << 63
_INLINE_BYTES = 1024  # longer byte strings are leaves: base64 in JSON would cost a third more
_FACTORIES: dict[str, Any] = {
    "None": None,
    **{
        kind.__name__: kind
        for kind in (list, dict, set, tuple, int, float, bool, str, collections.OrderedDict, collections.Counter)
    },
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_UNSHARED = frozenset(
    "same int float str complex tuple named frozenset bytes bytes.leaf slice range datetime date timedelta path".split()
    + "np.scalar np.str np.bytes np.dtype torch.dtype torch.device torch.size".split()
)


def is_shared(node: Json) -> bool:
    """Whether the node is of something mutable, which later nodes may name again."""
    return type(node) is dict or (type(node) is list and node[0] not in _UNSHARED)


def as_count(value: Json) -> int:
    """An index or length from a file; a negative one would silently count from the end."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def encode_int(value: int) -> Json:
    # Large ones in hex: Python limits how many decimal digits it converts.
    return value if -_SMALL_INT <= value < _SMALL_INT else ["int", hex(value)]


def encode_float(value: float) -> Json:
    return value if math.isfinite(value) else ["float", repr(value)]


def encode_str(value: str) -> Json:
    if value.isascii() or is_text(value):
        return value
    # Lone surrogates: JSON would take two of them for one character.
    return ["str", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_items(encoder: Encoder, mapping: Mapping[Any, Any]) -> Json:
    """An object where all keys are text, else the list ``[key, value, key, value, ...]``."""
    plain = all(type(key) is str and is_text(key) for key in mapping)
    named: dict[str, Json] = {}
    flat: list[Json] = []
    for key, value in mapping.items():
        encoder.path.append(key)
        if plain:
            named[key] = encoder.encode(value)
        else:
            flat += (_encode_key(encoder, key), encoder.encode(value))
        encoder.path.pop()
    return named if plain else flat


def decode_items(decoder: Decoder, node: Json) -> Iterator[tuple[Any, Any]]:
    if type(node) is dict:
        pairs: Iterable[tuple[Json, Json]] = node.items()
    elif type(node) is list and len(node) % 2 == 0:
        pairs = zip(node[::2], node[1::2], strict=True)
    else:
        raise ValueError("items are neither an object nor pairs")
    for key_node, value_node in pairs:
        key = decoder.decode(key_node)
        decoder.path.append(key)
        value = decoder.decode(value_node)
        decoder.path.pop()
        yield key, value


def _encode_key(encoder: Encoder, key: Any) -> Json:
    node = encoder.encode(key)
    if is_shared(node) or (type(node) is list and node[0] == "same"):
        raise CheckpointError(
            f"{encoder.where()} has {with_article(type(key).__name__)} as key; use strings, numbers or tuples of them"
        )
    return node


def encode_sequence(encoder: Encoder, values: Iterable[Any], *head: Json) -> Json:
    node = list(head)
    for index, value in enumerate(values):
        encoder.path.append(index)
        node.append(encoder.encode(value))
        encoder.path.pop()
    return node


def decode_sequence(decoder: Decoder, nodes: list[Json]) -> list[Any]:
    values = []
    for index, node in enumerate(nodes):
        decoder.path.append(index)
        values.append(decoder.decode(node))
        decoder.path.pop()
    return values


def _encode_dict(encoder: Encoder, value: dict[Any, Any]) -> Json:
    items = encode_items(encoder, value)
    return items if type(items) is dict else ["dict", items]


def _encode_ordered(encoder: Encoder, value: collections.OrderedDict[Any, Any]) -> Json:
    extra = {key: found for key, found in vars(value).items() if key != "_metadata"}
    if extra:
        return encoder.unsafe(
            value, f"is an OrderedDict with attributes ({', '.join(extra)}), which only pickle can hold"
        )
    if not hasattr(value, "_metadata"):
        return ["odict", encode_items(encoder, value)]
    # What nn.Module.state_dict() returns: the metadata are the versions that load_state_dict upgrades from.
    return ["state_dict", encoder.encode(value._metadata), encode_items(encoder, value)]


def _encode_defaultdict(encoder: Encoder, value: collections.defaultdict[Any, Any]) -> Json:
    factory = value.default_factory
    if factory is not None and (not isinstance(factory, type) or factory not in _FACTORY_NAMES):
        return encoder.unsafe(
            value, f"is a defaultdict of {factory!r}, which only pickle can hold: save dict(...) of it"
        )
    return ["defaultdict", _FACTORY_NAMES[factory], encode_items(encoder, value)]


def _encode_bytes(encoder: Encoder, value: bytes) -> Json:
    if len(value) > _INLINE_BYTES:
        return ["bytes.leaf", encoder.leaves.add(Leaf.of_bytes(value, encoder.path))]
    return ["bytes", base64.b64encode(value).decode()]


def _encode_datetime(encoder: Encoder, value: datetime.datetime) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return encoder.unsafe(
            value, f"has the time zone {value.tzinfo!r}, which only pickle can hold: use .astimezone(timezone.utc)"
        )
    return ["datetime", value.isoformat(), value.fold]


def _decode_dict(decoder: Decoder, node: Json) -> Any:
    return dict(decode_items(decoder, node if type(node) is dict else node[1]))


def _decode_state_dict(decoder: Decoder, node: Json) -> Any:
    metadata = decoder.decode(node[1])
    state: Any = collections.OrderedDict(decode_items(decoder, node[2]))
    state._metadata = metadata
    return state


def _decode_counter(decoder: Decoder, node: Json) -> Any:
    counter: collections.Counter[Any] = collections.Counter()
    counter.update(dict(decode_items(decoder, node[1])))
    return counter


def _decode_int(decoder: Decoder, node: Json) -> int:
    return int(node[1], 16)


def _decode_bytearray(decoder: Decoder, node: Json) -> bytearray:
    data = decoder.decode(node[1])
    if type(data) is not bytes:  # of a number it would make that many zeros
        raise ValueError("a bytearray that is not made of bytes")
    return bytearray(data)


def _decode_random(decoder: Decoder, node: Json) -> random.Random:
    generator = random.Random()
    generator.setstate(decoder.decode(node[1]))
    return generator


def _decode_base64(text: Json) -> bytes:
    return base64.b64decode(text, validate=True)


SCALARS: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    str: encode_str,
}

ENCODERS: dict[type, Callable[[Any, Any], Json]] = {
    dict: _encode_dict,
    list: lambda e, v: encode_sequence(e, v, "list"),
    tuple: lambda e, v: encode_sequence(e, v, "tuple"),
    set: lambda e, v: encode_sequence(e, v, "set"),
    frozenset: lambda e, v: encode_sequence(e, v, "frozenset"),
    collections.deque: lambda e, v: encode_sequence(e, v, "deque", v.maxlen),
    collections.OrderedDict: _encode_ordered,
    collections.Counter: lambda e, v: ["counter", encode_items(e, v)],
    collections.defaultdict: _encode_defaultdict,
    bytes: _encode_bytes,
    bytearray: lambda e, v: ["bytearray", e.encode(bytes(v))],
    complex: lambda e, v: ["complex", encode_float(v.real), encode_float(v.imag)],
    slice: lambda e, v: encode_sequence(e, (v.start, v.stop, v.step), "slice"),
    range: lambda e, v: encode_sequence(e, (v.start, v.stop, v.step), "range"),
    datetime.datetime: _encode_datetime,
    datetime.date: lambda e, v: ["date", v.isoformat()],
    datetime.timedelta: lambda e, v: ["timedelta", v.days, v.seconds, v.microseconds],
    type(pathlib.Path()): lambda e, v: ["path", encode_str(str(v))],
    random.Random: lambda e, v: ["random", e.encode(v.getstate())],
}

DECODERS: dict[Any, Callable[[Any, Any], Any]] = {
    "dict": _decode_dict,
    "list": lambda d, n: decode_sequence(d, n[1:]),
    "tuple": lambda d, n: tuple(decode_sequence(d, n[1:])),
    "set": lambda d, n: set(decode_sequence(d, n[1:])),
    "frozenset": lambda d, n: frozenset(decode_sequence(d, n[1:])),
    "deque": lambda d, n: collections.deque(decode_sequence(d, n[2:]), n[1]),
    "odict": lambda d, n: collections.OrderedDict(decode_items(d, n[1])),
    "state_dict": _decode_state_dict,
    "counter": _decode_counter,
    "defaultdict": lambda d, n: collections.defaultdict(_FACTORIES[n[1]], decode_items(d, n[2])),
    "bytes": lambda d, n: _decode_base64(n[1]),
    "bytes.leaf": lambda d, n: d.leaves.get(n[1]).data.tobytes(),
    "bytearray": _decode_bytearray,
    "int": _decode_int,
    "float": lambda d, n: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[n[1]],
    "complex": lambda d, n: complex(d.decode(n[1]), d.decode(n[2])),
    "str": lambda d, n: _decode_base64(n[1]).decode("utf-8", "surrogatepass"),
    "slice": lambda d, n: slice(*decode_sequence(d, n[1:])),
    "range": lambda d, n: range(*decode_sequence(d, n[1:])),
    "datetime": lambda d, n: datetime.datetime.fromisoformat(n[1]).replace(fold=n[2]),
    "date": lambda d, n: datetime.date.fromisoformat(n[1]),
    "timedelta": lambda d, n: datetime.timedelta(n[1], n[2], n[3]),
    "path": lambda d, n: pathlib.Path(d.decode(n[1])),
    "random": _decode_random,
    "named": named_tuples.decode,
    "shards": lambda d, n: d.shards[n[1]],
}
