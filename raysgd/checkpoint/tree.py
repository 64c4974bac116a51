"""A state as JSON: the tree of containers and scalars, with references to the tensors that are stored beside it.

How a value is written
    null, true, 1, 0.5, "text" stand for themselves; an object is a dict with str keys; everything else is a list that
    begins with its kind: ``["list", ...]``, ``["dict", [k, v, ...]]``, ``["torch.tensor", leaf, dtype, ...]``.
    The n-th mutable thing to be finished can be named again by ``["same", n]``, so that one object at two places of
    the state (tied parameters) comes back as one object.

The kinds are closed tables (`codecs`, `arrays`, `torch_leaves`): a file can choose from them and no more, so that
reading one runs nothing. What none of them holds is pickled if ``trusted=True`` was given, else refused by name.

Runs in workers (writing, reading) and drivers (reading). Imports neither NumPy nor torch by itself.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from raysgd.checkpoint import codecs, named_tuples
from raysgd.checkpoint.foreign import find_decoder, find_encoder
from raysgd.checkpoint.leaves import Leaf, LeafSource, LeafWriter
from raysgd.checkpoint.shards import ShardWriter
from raysgd.checkpoint.state_dicts import stand_in
from raysgd.errors import CheckpointCorruptError, CheckpointError, UnsafeStateError

Json: TypeAlias = Any

MAX_DEPTH = 200
NO_SHARDS: Mapping[str, Any] = MappingProxyType({})
MAX_VALUES = 50_000_000
_MAX_SHOWN = 16  # keys of a path in a message
_TOO_DEEP = f"nests deeper than {MAX_DEPTH} levels; flatten it, or take out what refers back to its owner"


class Encoder:
    """Turns one state into JSON and leaves. Used by one thread, once.

    Attributes:
        path: The keys from the root to the value at hand.
        leaves: Takes what is too large for JSON.
        shards: Takes arrays that are distributed over ranks; None where one rank saves for all.
        num_pickled: How many values only pickle could hold.
    """

    def __init__(
        self, leaves: LeafWriter, *, trusted: bool = False, root: str = "state", shards: ShardWriter | None = None
    ) -> None:
        self.path: list[Any] = []
        self._root = root
        self.leaves = leaves
        self.shards = shards
        self.num_pickled = 0
        self._trusted = trusted
        self._numbers: dict[int, int] = {}  # id of a finished mutable value -> its number
        self._num_shared = 0
        self._open: set[int] = set()
        self._alive: list[Any] = []  # ids stay unique only while their objects live
        self._num_values = 0

    def encode_state(self, state: Any) -> Json:
        """The JSON of a whole state.

        Raises:
            UnsafeStateError: A value only pickle could hold, without ``trusted``.
            CheckpointError: The state contains itself, nests too deeply, or is a tensor that cannot be saved.
        """
        try:
            return self.encode(state)
        except RecursionError as error:
            raise CheckpointError(f"{self.where()} {_TOO_DEEP}") from error

    def encode(self, value: Any) -> Json:
        """The JSON of one value; ``path`` must say where it is."""
        self._count()
        kind = type(value)
        if kind in codecs.SCALARS:
            return codecs.SCALARS[kind](value)
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        encode = codecs.ENCODERS.get(kind) or find_encoder(value)
        if encode is None:
            inner = stand_in(value)
            if inner is not None:
                return self._encode_stand_in(value, inner)
            # A pickle would hold the whole of an array that ranks are to share, if it can be had at all.
            is_taken_apart = not self._trusted or self.shards is not None
            encode = (is_taken_apart and named_tuples.find_encoder(value)) or _encode_pickled
        return self._encode_by(encode, value)

    def where(self) -> str:
        """The place of the value at hand, such as ``state['model']['weight']``."""
        return show_path(self._root, self.path)

    def unsafe(self, value: Any, why: str) -> Json:
        """The pickled ``value``, or the error that says why it is refused."""
        place = self.where()
        if not self._trusted:
            text = f"{place} {why}. Or pass trusted=True to save_checkpoint and load_checkpoint."
            raise UnsafeStateError(text, path=place)
        try:
            data = _pickler().dumps(value)
        except Exception as error:
            raise UnsafeStateError(f"{place} {why}, and it does not pickle: {error}", path=place) from error
        self.num_pickled += 1
        return ["pickle", self.leaves.add(Leaf.of_bytes(data, self.path))]

    def _encode_by(self, encode: Callable[[Encoder, Any], Json], value: Any) -> Json:
        if id(value) in self._open:
            raise CheckpointError(f"{self.where()} contains itself; a checkpoint holds trees only")
        self._open.add(id(value))
        node = encode(self, value)
        self._open.discard(id(value))
        if codecs.is_shared(node):
            self._finished(value, self._num_shared)
            self._num_shared += 1
        return node

    def _encode_stand_in(self, value: Any, inner: Any) -> Json:
        node = self.encode(inner)
        if id(inner) in self._numbers:  # the same module at a second place is then the same state dict
            self._finished(value, self._numbers[id(inner)])
        return node

    def _finished(self, value: Any, number: int) -> None:
        self._numbers[id(value)] = number
        self._alive.append(value)

    def _count(self) -> None:
        self._num_values += 1
        if len(self.path) > MAX_DEPTH:
            raise CheckpointError(f"{self.where()} {_TOO_DEEP}")
        if self._num_values > MAX_VALUES:
            raise CheckpointError(f"the state has more than {MAX_VALUES:,} values; save numbers as arrays, not lists")


class Decoder:
    """Turns the JSON of one state back into it. Used by one thread, once.

    Attributes:
        path: The keys from the root to the value at hand.
        leaves: Gives what is stored beside the JSON.
        shards: The arrays that are distributed over ranks, by their places.
    """

    def __init__(
        self,
        leaves: LeafSource,
        where: str,
        *,
        trusted: bool = False,
        root: str = "state",
        shards: Mapping[str, Any] = NO_SHARDS,
    ) -> None:
        self.path: list[Any] = []
        self._root = root
        self.leaves = leaves
        self.shards = shards
        self._where = where
        self._trusted = trusted
        self._shared: list[Any] = []

    def decode_state(self, node: Json) -> Any:
        """The state.

        Raises:
            UnsafeStateError: It holds pickles, without ``trusted``.
            CheckpointCorruptError: The JSON is none that `Encoder` writes.
        """
        try:
            return self.decode(node)
        except (CheckpointError, ImportError, MemoryError):
            raise
        except Exception as error:  # whatever a damaged node made NumPy, torch or the built-in types raise
            raise CheckpointCorruptError(f"{self._where}: {self.where()} is damaged: {_one_line(error)}") from error

    def decode(self, node: Json) -> Any:
        """The value of one node; ``path`` must say where it is."""
        kind = type(node)
        if kind is not dict and kind is not list:
            return node
        if len(self.path) > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        tag = "dict" if kind is dict else node[0]
        if tag == "same":
            return self._shared[codecs.as_count(node[1])]
        value = self._decoder(tag)(self, node)
        if codecs.is_shared(node):
            self._shared.append(value)
        return value

    def where(self) -> str:
        return show_path(self._root, self.path)

    def _decoder(self, tag: Any) -> Callable[[Decoder, Json], Any]:
        if tag == "pickle":
            return _decode_pickle if self._trusted else _refuse_pickle
        decode = codecs.DECODERS.get(tag) or find_decoder(tag)
        if decode is None:
            raise ValueError(f"{tag!r} is no kind of value this version knows")
        return decode


def show_path(root: str, path: list[Any]) -> str:
    if len(path) > _MAX_SHOWN:
        return show_path(root, path[:_MAX_SHOWN]) + "..."
    return root + "".join(f"[{part!r}]" for part in path)


def _encode_pickled(encoder: Encoder, value: Any) -> Json:
    why = f"is {_describe(value)}, which only pickle can hold: save plain data or a state_dict()"
    return encoder.unsafe(value, why)


def _refuse_pickle(decoder: Decoder, node: Json) -> Any:
    place = decoder.where()
    text = f"{place} was saved by pickle, which can run code when loaded; pass trusted=True if you trust its writer"
    raise UnsafeStateError(text, path=place)


def _decode_pickle(decoder: Decoder, node: Json) -> Any:
    data = decoder.leaves.get(node[1]).data.tobytes()
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"{decoder.where()} does not unpickle here: {_one_line(error)}") from error


def _pickler() -> Any:
    """cloudpickle where it is installed: it takes lambdas and classes of the main script."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _describe(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
