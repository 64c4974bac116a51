"""`export`: writes the model of a checkpoint as safetensors files, which transformers loads. Driver or worker side.

The files are written by raysgd's own writer: the safetensors library would need all tensors of a file in memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from raysgd._util.text import with_article
from raysgd.checkpoint.checkpoint import Checkpoint, load_state
from raysgd.checkpoint.codecs.torch import stored_dtype
from raysgd.checkpoint.format.safetensors import encode_header
from raysgd.checkpoint.resharding import SavedArray
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import read_manifest
from raysgd.config.checks import check_count
from raysgd.errors import CheckpointError, ConfigError

#: What wrappers of torch put into the names of parameters.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_DDP_PREFIX = "module."
_METADATA = {"format": "pt"}  # transformers refuses files without it
_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_CONFIG_FILE = "config.json"


def export(
    checkpoint: Checkpoint | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    key: str | None = "model",
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    allow_pickle: bool = False,
) -> None:
    """Write the model of a checkpoint as safetensors files, in the layout that ``transformers`` and others load.

        raysgd.torch.export(trainer.get_last_checkpoint(), "my-model", config=model.config)
        model = AutoModelForCausalLM.from_pretrained("my-model")

    The folder gets ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
    ``model.safetensors.index.json``. It appears only once it is complete. Of a model that ranks saved in shards, one tensor at
    a time is in memory, whatever strategies saved it. Other checkpoints are loaded whole. Names are those of the model without
    wrappers (DDP, ``torch.compile``). Tensors that share memory, as tied weights do, are written once, under the first name.

    Args:
        checkpoint: The checkpoint, or its path.
        folder: A local folder that does not exist, or is empty.
        key: Where the model's state dict lies in the saved state. None: the state is the state dict.
        config: The config of transformers, or a dict: ``config.json`` is written of it. None: no such file is written.
        dtype: Type of the floating point tensors in the files, such as ``"bfloat16"``. None: as they were saved.
        max_shard_bytes: Bytes of the tensors in a file; a larger tensor gets a file of its own.
        allow_pickle: Allow pickled values in the checkpoint, which can run code when loaded.

    Raises:
        CheckpointError: The checkpoint has no such key, no tensors there, or values that are not tensors.
        CheckpointCorruptError: A file of the checkpoint is missing, or does not match its checksum.
        ConfigError: The folder is not empty, or ``config`` or ``dtype`` cannot be used.
    """
    check_count("max_shard_bytes", max_shard_bytes, minimum=1)
    written_dtype = _check_dtype(dtype)
    _check_config(config)
    given = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.from_path(checkpoint)
    state = _load(given, allow_pickle=allow_pickle)
    tensors = _without_tied(_find_tensors(state, key, given), state)
    types = {name: _written_dtype(name, tensor, written_dtype) for name, tensor in tensors.items()}
    with new_folder(folder) as partial:
        _write_files(partial, tensors, types, max_shard_bytes)
        if config is not None:
            _write_config(partial, config, {each for each in types.values() if each.is_floating_point})


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to write to, which becomes this one once the block has ended without an error.

    Raises:
        ConfigError: The folder exists, and is not empty.
    """
    target = Path(folder).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"export to {target}: it exists and is not an empty folder; give another one.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_model(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load the model of a checkpoint into a whole model. One tensor at a time is in memory, if ranks saved it in shards.

    Raises:
        CheckpointError: It is that of another model.
    """
    tensors = _find_tensors(_load(checkpoint, allow_pickle=False), "model", checkpoint)
    own = model.state_dict()
    for name in sorted({*own, *tensors}):
        if name not in own or name not in tensors or tuple(own[name].shape) != tuple(tensors[name].shape):
            what = [f"{tuple(each[name].shape)}" if name in each else "no such tensor" for each in (tensors, own)]
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {name} is {what[0]} there, and {what[1]} here."
            )
        tensor = tensors[name]
        own[name].copy_(tensor.read() if isinstance(tensor, SavedArray) else tensor)


# -- what is exported ------------------------------------------------------------------------------


def _load(checkpoint: Checkpoint, *, allow_pickle: bool) -> Any:
    """Load a checkpoint; arrays in shards are read later, one by one."""
    if checkpoint.path is None:
        raise CheckpointError(f"{checkpoint!r} is in memory only: export a checkpoint that was written to storage.")
    directory = Storage.from_uri(checkpoint.path)
    manifest = read_manifest(directory)
    if manifest.is_files:
        raise CheckpointError(f"{checkpoint.path} was saved with files=True: its files are in {checkpoint!r}.load().")
    return load_state(directory, manifest, 0, allow_pickle=allow_pickle, world_size=manifest.world_size)


def _find_tensors(state: Any, key: str | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the tensors of the model by their names, of which wrappers' prefixes are removed."""
    place = "the state" if key is None else f"state[{key!r}]"
    if key is not None:
        if not isinstance(state, Mapping) or key not in state:
            found = ", ".join(repr(name) for name in state) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"{checkpoint.path} has no {place}: it holds {found}; give one of these as key "
                "(--key of `raysgd ckpt export`)."
            )
        state = state[key]
    if not isinstance(state, Mapping) or not state:
        what = "empty" if isinstance(state, Mapping) else with_article(type(state).__name__)
        raise CheckpointError(
            f"{checkpoint.path}: {place} is {what}; export needs the state dict of a model: give key=..."
        )
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) and not _is_saved_tensor(value):
            raise CheckpointError(
                f"{checkpoint.path}: {place}[{name!r}] is {with_article(type(value).__name__)}, not a tensor; give the key of a "
                "model's state dict."
            )
    tensors = {_WRAPPERS.sub("", name): value for name, value in state.items()}
    if all(name.startswith(_DDP_PREFIX) for name in tensors):
        tensors = {name.removeprefix(_DDP_PREFIX): value for name, value in tensors.items()}
    return tensors


def _is_saved_tensor(value: Any) -> bool:
    return isinstance(value, SavedArray) and isinstance(value.dtype, torch.dtype)


def _without_tied(tensors: dict[str, Any], state: Any) -> dict[str, Any]:
    """Leave out tensors that another name has already: those in the same memory, and those that the engine says are tied."""
    engine = state.get("engine") if isinstance(state, Mapping) else None
    tied = engine.get("tied", {}) if isinstance(engine, Mapping) else {}
    kept: dict[str, Any] = {}
    seen: set[Any] = set()
    for name, tensor in tensors.items():
        memory = _memory(tensor)
        if tied.get(name) not in tensors and (memory is None or memory not in seen):
            kept[name] = tensor
            seen.add(memory)
    return kept


def _memory(tensor: Any) -> Any:
    """Return a key that is equal for tensors with the same values at the same place; None for an empty one."""
    if isinstance(tensor, SavedArray):
        return tensor.place_of_data or None
    if not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _written_dtype(name: str, tensor: Any, dtype: torch.dtype | None) -> torch.dtype:
    found: torch.dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if stored_dtype(found)[1] != 1:
        raise CheckpointError(f"{name} has dtype {found}, which safetensors files cannot hold.")
    return found


# -- files -----------------------------------------------------------------------------------------


def _write_files(
    folder: Path, tensors: Mapping[str, Any], types: Mapping[str, torch.dtype], max_shard_bytes: int
) -> None:
    sizes = {
        name: tensor.shape.numel() if isinstance(tensor, torch.Tensor) else tensor.size
        for name, tensor in tensors.items()
    }
    num_bytes = {name: size * types[name].itemsize for name, size in sizes.items()}
    shards = list(_split(num_bytes, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = _FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        # Large elements first, so that each tensor is aligned.
        ordered = sorted(names, key=lambda name: -types[name].itemsize)
        with open(folder / file, "wb") as stream:
            entries = [
                (name, stored_dtype(types[name])[0], tuple(tensors[name].shape), num_bytes[name]) for name in ordered
            ]
            stream.write(encode_header(entries, _METADATA))
            for name in ordered:
                stream.write(_bytes_of(tensors[name], types[name]))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
        (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _split(num_bytes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Divide names into groups of at most ``limit`` bytes, in their order."""
    group: list[str] = []
    total = 0
    for name, size in num_bytes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _bytes_of(tensor: Any, dtype: torch.dtype) -> memoryview | bytes:
    read = tensor.read() if isinstance(tensor, SavedArray) else tensor.detach()
    if not read.numel():
        return b""
    values = read.to(dtype).contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = values.numpy().data
    return data


# -- config ----------------------------------------------------------------------------------------


def _check_dtype(dtype: Any) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(
            f"export(dtype={dtype!r}) is not a floating point type of torch; give one such as 'bfloat16'."
        )
    return found


def _check_config(config: Any) -> None:
    if isinstance(config, torch.nn.Module):
        raise ConfigError(
            f"export(config=...) is the model, {with_article(type(config).__name__)}; give its model.config."
        )
    if (
        config is not None
        and not isinstance(config, Mapping)
        and not callable(getattr(config, "save_pretrained", None))
    ):
        raise ConfigError(
            f"export(config=...) is {with_article(type(config).__name__)}; give the config of transformers, or a dict."
        )


def _write_config(folder: Path, config: Any, types: Iterable[torch.dtype]) -> None:
    """Write ``config.json``; a config of transformers says which type the tensors have, if they have one."""
    if isinstance(config, Mapping):
        (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        return
    own, found = copy.deepcopy(config), list(types)
    if len(found) == 1 and hasattr(own, "dtype"):
        own.dtype = found[0]
    own.save_pretrained(folder)
