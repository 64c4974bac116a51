"""The tree of a state as JSON: containers and scalars, with references to the leaves that are stored next to it.

A node is a JSON scalar, an object (a dict whose keys are all strings) or a list ``[tag, ...]``. Encoders are found by exact
type, decoders by tag, in tables that are complete. A subclass, such as an enum, is not encoded as its base class, which would
lose its meaning.
"""

from __future__ import annotations

import base64
import collections
import datetime
import functools
import importlib
import math
import pathlib
import pickle
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from raysgd._util.text import with_article
from raysgd.checkpoint.codecs.frameworks import extract_state, find_decoder, find_encoder, synchronize
from raysgd.checkpoint.codecs.leaves import ITEM_BYTES, AddLeaf, GetLeaf, Json, Leaf, StoredLeaf
from raysgd.checkpoint.codecs.shards import SHARDS_KEY, ShardWriter
from raysgd.errors import CheckpointCorruptError, CheckpointError, UnsafeStateError

MAX_DEPTH = 200
MAX_VALUES = 50_000_000
NO_SHARDS: Mapping[str, Any] = MappingProxyType({})
_MAX_SHOWN = 16  # keys of a path in a message
_TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels: flatten it, or remove references from an object back to its owner"

_SMALL_INT = 1 << 63
_INLINE_BYTES = 1024  # longer byte strings are leaves: base64 in JSON would cost a third more
_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_MAX_FIELDS = 1000


class Encoder:
    """Turns one state into JSON and leaves. Used by one thread, once.

    Attributes:
        path: The keys from the root to the current value.
        add_leaf: Takes what is too large for JSON.
        shards: Takes arrays that are distributed over ranks; None where one rank saves for all.
    """

    def __init__(
        self, add_leaf: AddLeaf, *, allow_pickle: bool = False, root: str = "state", shards: ShardWriter | None = None
    ) -> None:
        self.path: list[Any] = []
        self._root = root
        self.add_leaf = add_leaf
        self.shards = shards
        self._allow_pickle = allow_pickle
        self._numbers: dict[int, int] = {}  # id of a finished mutable value -> its number
        self._num_shared = 0
        self._open: set[int] = set()
        self._alive: list[Any] = []  # ids stay unique only while their objects live
        self._num_values = 0

    def encode_state(self, state: Any) -> Json:
        """Encode a whole state.

        Raises:
            UnsafeStateError: Only pickle could hold a value, and ``allow_pickle`` is False.
            CheckpointError: The state contains itself, nests too deeply, or is a tensor that cannot be saved.
        """
        try:
            return self.encode(state)
        except RecursionError as error:
            raise CheckpointError(f"{self.where()} {_TOO_DEEP}") from error

    def encode(self, value: Any) -> Json:
        """Encode one value, which lies at ``path``."""
        self._count()
        kind = type(value)
        if kind in SCALARS:
            return SCALARS[kind](value)
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        encode = ENCODERS.get(kind) or find_encoder(value)
        if encode is None:
            inner = extract_state(value)
            if inner is not None:
                return self._encode_extracted(value, inner)
            # Not pickled where arrays are saved in shards: no rank may have the whole of an array.
            has_named_tuples = not self._allow_pickle or self.shards is not None
            encode = (has_named_tuples and _find_named_tuple_encoder(value)) or _encode_pickled
        return self._encode_by(encode, value)

    def where(self) -> str:
        """Return the place of the current value, such as ``state['model']['weight']``."""
        return show_path(self._root, self.path)

    def unsafe(self, value: Any, why: str) -> Json:
        """Pickle ``value`` if that is allowed.

        Raises:
            UnsafeStateError: Pickle is not allowed or fails; the text begins with the place and ``why``.
        """
        place = self.where()
        if not self._allow_pickle:
            text = f"{place} {why}. Or pass allow_pickle=True to save_checkpoint and load_checkpoint."
            raise UnsafeStateError(text, path=place)
        try:
            data = _pickler().dumps(value)
        except Exception as error:
            raise UnsafeStateError(f"{place} {why}, and it does not pickle: {error}", path=place) from error
        return ["pickle", self.add_leaf(Leaf.of_bytes(data, self.path))]

    def _encode_by(self, encode: Callable[[Encoder, Any], Json], value: Any) -> Json:
        if id(value) in self._open:
            raise CheckpointError(
                f"{self.where()} contains itself; a checkpoint can only hold trees: remove the reference"
            )
        self._open.add(id(value))
        node = encode(self, value)
        self._open.discard(id(value))
        if is_shared(node):
            self._remember(value, self._num_shared)
            self._num_shared += 1
        return node

    def _encode_extracted(self, value: Any, inner: Any) -> Json:
        node = self.encode(inner)
        if id(inner) in self._numbers:  # a module that appears twice is saved once, and loaded as one state dict
            self._remember(value, self._numbers[id(inner)])
        return node

    def _remember(self, value: Any, number: int) -> None:
        self._numbers[id(value)] = number
        self._alive.append(value)

    def _count(self) -> None:
        self._num_values += 1
        if len(self.path) > MAX_DEPTH:
            raise CheckpointError(f"{self.where()} {_TOO_DEEP}")
        if self._num_values > MAX_VALUES:
            raise CheckpointError(f"the state has more than {MAX_VALUES:,} values; save numbers as arrays, not lists")


class Decoder:
    """Turns JSON back into the state that it was encoded from. Used by one thread, once.

    Attributes:
        path: The keys from the root to the current value.
        get_leaf: Gives what is stored next to the JSON.
        shards: The arrays that are distributed over ranks, by their places in the state.
    """

    def __init__(
        self,
        get_leaf: GetLeaf,
        where: str,
        *,
        allow_pickle: bool = False,
        root: str = "state",
        shards: Mapping[str, Any] = NO_SHARDS,
    ) -> None:
        self.path: list[Any] = []
        self._root = root
        self.get_leaf = get_leaf
        self.shards = shards
        self._where = where
        self._allow_pickle = allow_pickle
        self._shared: list[Any] = []

    def decode_state(self, node: Json) -> Any:
        """Decode a whole state.

        Raises:
            UnsafeStateError: It holds pickles, and ``allow_pickle`` is False.
            CheckpointCorruptError: `Encoder` writes no such JSON.
        """
        try:
            return self.decode(node)
        except (CheckpointError, ImportError, MemoryError):
            raise
        except Exception as error:  # a damaged node makes NumPy, torch and the built-in types raise anything
            raise CheckpointCorruptError(f"{self._where}: {self.where()} is damaged: {_one_line(error)}") from error

    def decode(self, node: Json) -> Any:
        """Decode one node, whose value lies at ``path``."""
        kind = type(node)
        if kind is not dict and kind is not list:
            return node
        if len(self.path) > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        tag = "dict" if kind is dict else node[0]
        if tag == "same":
            return self._shared[parse_count(node[1])]
        value = self._decoder(tag)(self, node)
        if is_shared(node):
            self._shared.append(value)
        return value

    def where(self) -> str:
        return show_path(self._root, self.path)

    def _decoder(self, tag: Any) -> Callable[[Decoder, Json], Any]:
        if tag == "pickle":
            return _decode_pickle if self._allow_pickle else _refuse_pickle
        decode = DECODERS.get(tag) or find_decoder(tag)
        if decode is None:
            raise ValueError(f"{tag!r} is a kind of value that this version does not know")
        return decode


def encode_small(state: Any, *, what: str = "state") -> Json:
    """Encode a small state as JSON alone: text, numbers, containers, generator states, and small tensors as base64.

    Runs in workers. The control plane carries the result without reading it, so that it needs no torch.

    Args:
        state: As for ``save_checkpoint``; nothing in it is pickled.
        what: What to call the state in errors.

    Raises:
        UnsafeStateError: Only pickle could hold one of its values.
    """
    return Encoder(_add_inline, root=what).encode_state(state)


def decode_small(node: Json, *, what: str = "state", where: str = "a manifest") -> Any:
    """Decode what `encode_small` returned.

    Raises:
        CheckpointCorruptError: `encode_small` returns no such JSON.
    """
    return Decoder(_get_inline, where, root=what).decode_state(node)


def _add_inline(leaf: Leaf) -> Json:
    """Make a reference that contains the leaf itself."""
    import numpy as np  # only here: most small states have no leaves

    area = np.empty(leaf.num_bytes, np.uint8)
    leaf.fill(leaf.source, area)
    synchronize([leaf])
    return ["inline", leaf.dtype, list(leaf.shape), base64.b64encode(area.tobytes()).decode()]


def _get_inline(reference: Json) -> StoredLeaf:
    import numpy as np

    _, dtype, shape, text = reference
    data = bytearray(base64.b64decode(text, validate=True))  # writable
    if math.prod(shape) * ITEM_BYTES[dtype] != len(data):
        raise ValueError(f"{len(data)} bytes do not fill {shape} of {dtype}")
    return StoredLeaf(dtype, tuple(shape), np.frombuffer(data, np.uint8))


def is_state(value: Any) -> bool:
    """Whether `Encoder` takes a value of this type without pickle. The items of containers are not checked."""
    if type(value) in SCALARS or type(value) in ENCODERS or find_encoder(value) or _find_named_tuple_encoder(value):
        return True
    return extract_state(value) is not None


def show_path(root: str, path: list[Any]) -> str:
    if len(path) > _MAX_SHOWN:
        return show_path(root, path[:_MAX_SHOWN]) + "..."
    return root + "".join(f"[{part!r}]" for part in path)


# -- pickles ---------------------------------------------------------------------------------------


def _encode_pickled(encoder: Encoder, value: Any) -> Json:
    why = f"is {_describe(value)}, which only pickle can hold: save plain data or a state_dict()"
    return encoder.unsafe(value, why)


def _refuse_pickle(decoder: Decoder, node: Json) -> Any:
    place = decoder.where()
    text = (
        f"{place} was saved by pickle, which can run code when loaded; pass allow_pickle=True if you trust its source"
    )
    raise UnsafeStateError(text, path=place)


def _decode_pickle(decoder: Decoder, node: Json) -> Any:
    data = decoder.get_leaf(node[1]).data.tobytes()
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"{decoder.where()} does not unpickle here: {_one_line(error)}") from error


def _pickler() -> Any:
    """Return cloudpickle if it is installed, as it takes lambdas and classes of the main script; else pickle."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _describe(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# -- scalars ---------------------------------------------------------------------------------------


def encode_int(value: int) -> Json:
    # Large ints in hex: Python limits how many decimal digits it converts.
    return value if -_SMALL_INT <= value < _SMALL_INT else ["int", hex(value)]


def encode_float(value: float) -> Json:
    return value if math.isfinite(value) else ["float", repr(value)]


def encode_str(value: str) -> Json:
    if value.isascii() or is_text(value):
        return value
    # Lone surrogates: a JSON parser would merge two of them into one character.
    return ["str", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()]


def _encode_bytes(encoder: Encoder, value: bytes) -> Json:
    if len(value) > _INLINE_BYTES:
        return ["bytes.leaf", encoder.add_leaf(Leaf.of_bytes(value, encoder.path))]
    return ["bytes", base64.b64encode(value).decode()]


def _encode_datetime(encoder: Encoder, value: datetime.datetime) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not datetime.timezone:
        return encoder.unsafe(
            value, f"has the time zone {value.tzinfo!r}, which only pickle can hold: use .astimezone(timezone.utc)"
        )
    return ["datetime", value.isoformat(), value.fold]


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode_bytearray(decoder: Decoder, node: Json) -> bytearray:
    data = decoder.decode(node[1])
    if type(data) is not bytes:  # bytearray(n) would make n zeros
        raise ValueError("a bytearray whose content is not bytes")
    return bytearray(data)


def _decode_random(decoder: Decoder, node: Json) -> random.Random:
    generator = random.Random()
    generator.setstate(decoder.decode(node[1]))
    return generator


def _decode_base64(text: Json) -> bytes:
    return base64.b64decode(text, validate=True)


def parse_count(value: Json) -> int:
    """Check an index or length from a file; a negative one would silently count from the end."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


# -- containers ------------------------------------------------------------------------------------


def is_shared(node: Json) -> bool:
    """Whether the node is of a mutable object, which later nodes may refer to as ``["same", number]``."""
    return type(node) is dict or (type(node) is list and node[0] not in _UNSHARED)


def encode_items(encoder: Encoder, mapping: Mapping[Any, Any]) -> Json:
    """Encode as an object if all keys are text, else as the list ``[key, value, key, value, ...]``."""
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


def _encode_key(encoder: Encoder, key: Any) -> Json:
    node = encoder.encode(key)
    if is_shared(node) or (type(node) is list and node[0] == "same"):
        raise CheckpointError(
            f"{encoder.where()} has {with_article(type(key).__name__)} as a key; use strings, numbers or tuples of them"
        )
    return node


def encode_each(encoder: Encoder, items: Iterable[tuple[Any, Any]], *head: Json) -> Json:
    """Encode values, given with their keys in the path, as ``[*head, value, value, ...]``."""
    node = list(head)
    for key, value in items:
        encoder.path.append(key)
        node.append(encoder.encode(value))
        encoder.path.pop()
    return node


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


def decode_each(decoder: Decoder, items: Iterable[tuple[Any, Json]]) -> list[Any]:
    values = []
    for key, node in items:
        decoder.path.append(key)
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
    # nn.Module.state_dict() returns this; the metadata hold the versions that load_state_dict upgrades from.
    return ["state_dict", encoder.encode(value._metadata), encode_items(encoder, value)]


def _encode_defaultdict(encoder: Encoder, value: collections.defaultdict[Any, Any]) -> Json:
    factory = value.default_factory
    if factory is not None and (not isinstance(factory, type) or factory not in _FACTORY_NAMES):
        return encoder.unsafe(
            value, f"is a defaultdict of {factory!r}, which only pickle can hold: save dict(...) of it"
        )
    return ["defaultdict", _FACTORY_NAMES[factory], encode_items(encoder, value)]


def _decode_dict(decoder: Decoder, node: Json) -> Any:
    return dict(decode_items(decoder, node if type(node) is dict else node[1]))


def _decode_state_dict(decoder: Decoder, node: Json) -> Any:
    metadata = decoder.decode(node[1])
    state: Any = collections.OrderedDict(decode_items(decoder, node[2]))
    state._metadata = metadata
    return state


# -- named tuples ----------------------------------------------------------------------------------


def _find_named_tuple_encoder(value: Any) -> Callable[[Any, Any], Json] | None:
    """Return the encoder of a named tuple that has no other attributes than its fields, or None."""
    names = getattr(type(value), "_fields", None)
    if not isinstance(value, tuple) or not isinstance(names, tuple) or getattr(value, "__dict__", None):
        return None
    fits = len(value) == len(names) <= _MAX_FIELDS and all(map(_is_name, (type(value).__name__, *names)))
    return _encode_named_tuple if fits else None


def _encode_named_tuple(encoder: Any, value: Any) -> Json:
    fields = value._fields
    return encode_each(encoder, zip(fields, value, strict=True), "named", type(value).__name__, list(fields))


def _decode_named_tuple(decoder: Any, node: Json) -> Any:
    _, name, fields, *items = node
    kind = _make_named_tuple(name, tuple(fields))
    return kind(*decode_each(decoder, zip(fields, items, strict=True)))


@functools.lru_cache(maxsize=256)
def _make_named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    if len(fields) > _MAX_FIELDS or not all(map(_is_name, (name, *fields))):
        raise ValueError("not the names of a class and its fields")
    return collections.namedtuple(name, fields)  # refuses keywords and duplicate names


def _is_name(name: Any) -> bool:
    return type(name) is str and _FIELD_NAME.fullmatch(name) is not None


# -- tables ----------------------------------------------------------------------------------------


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

SCALARS: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    str: encode_str,
}

ENCODERS: dict[type, Callable[[Any, Any], Json]] = {
    dict: _encode_dict,
    list: lambda e, v: encode_each(e, enumerate(v), "list"),
    tuple: lambda e, v: encode_each(e, enumerate(v), "tuple"),
    set: lambda e, v: encode_each(e, enumerate(v), "set"),
    frozenset: lambda e, v: encode_each(e, enumerate(v), "frozenset"),
    collections.deque: lambda e, v: encode_each(e, enumerate(v), "deque", v.maxlen),
    collections.OrderedDict: _encode_ordered,
    collections.Counter: lambda e, v: ["counter", encode_items(e, v)],
    collections.defaultdict: _encode_defaultdict,
    bytes: _encode_bytes,
    bytearray: lambda e, v: ["bytearray", e.encode(bytes(v))],
    complex: lambda e, v: ["complex", encode_float(v.real), encode_float(v.imag)],
    slice: lambda e, v: encode_each(e, enumerate((v.start, v.stop, v.step)), "slice"),
    range: lambda e, v: encode_each(e, enumerate((v.start, v.stop, v.step)), "range"),
    datetime.datetime: _encode_datetime,
    datetime.date: lambda e, v: ["date", v.isoformat()],
    datetime.timedelta: lambda e, v: ["timedelta", v.days, v.seconds, v.microseconds],
    type(pathlib.Path()): lambda e, v: ["path", encode_str(str(v))],
    random.Random: lambda e, v: ["random", e.encode(v.getstate())],
}

DECODERS: dict[Any, Callable[[Any, Any], Any]] = {
    "dict": _decode_dict,
    "list": lambda d, n: decode_each(d, enumerate(n[1:])),
    "tuple": lambda d, n: tuple(decode_each(d, enumerate(n[1:]))),
    "set": lambda d, n: set(decode_each(d, enumerate(n[1:]))),
    "frozenset": lambda d, n: frozenset(decode_each(d, enumerate(n[1:]))),
    "deque": lambda d, n: collections.deque(decode_each(d, enumerate(n[2:])), n[1]),
    "odict": lambda d, n: collections.OrderedDict(decode_items(d, n[1])),
    "state_dict": _decode_state_dict,
    "counter": lambda d, n: collections.Counter(dict(decode_items(d, n[1]))),
    "defaultdict": lambda d, n: collections.defaultdict(_FACTORIES[n[1]], decode_items(d, n[2])),
    "bytes": lambda d, n: _decode_base64(n[1]),
    "bytes.leaf": lambda d, n: d.get_leaf(n[1]).data.tobytes(),
    "bytearray": _decode_bytearray,
    "int": lambda d, n: int(n[1], 16),
    "float": lambda d, n: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[n[1]],
    "complex": lambda d, n: complex(d.decode(n[1]), d.decode(n[2])),
    "str": lambda d, n: _decode_base64(n[1]).decode("utf-8", "surrogatepass"),
    "slice": lambda d, n: slice(*decode_each(d, enumerate(n[1:]))),
    "range": lambda d, n: range(*decode_each(d, enumerate(n[1:]))),
    "datetime": lambda d, n: datetime.datetime.fromisoformat(n[1]).replace(fold=n[2]),
    "date": lambda d, n: datetime.date.fromisoformat(n[1]),
    "timedelta": lambda d, n: datetime.timedelta(n[1], n[2], n[3]),
    "path": lambda d, n: pathlib.Path(d.decode(n[1])),
    "random": _decode_random,
    "named": _decode_named_tuple,
    SHARDS_KEY: lambda d, n: d.shards[n[1]],
}
