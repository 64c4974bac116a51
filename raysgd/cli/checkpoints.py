"""``raysgd ckpt``: list, check, merge and export checkpoints. Driver side, without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from raysgd.checkpoint.storage.storage import Storage
from raysgd.cli.console import (
    FAILED,
    SUCCEEDED,
    json_flag,
    print_error,
    print_json,
    print_table,
    storage_flag,
    whole_number,
)
from raysgd.cli.runs.completing import run_argument
from raysgd.cli.runs.finding import existing_folder, find_run
from raysgd.cli.runs.listing import age
from raysgd.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from raysgd.runs.finding import newest_run, run_name

if TYPE_CHECKING:
    from raysgd.checkpoint.format.manifest import Manifest

_PICKLE = "Allow pickled values in the checkpoint, which can run code when they are loaded."


@dataclass(frozen=True)
class Found:
    """A checkpoint that a user means."""

    folder: Storage
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        """Return what programs want of it."""
        manifest = self.manifest
        return {
            "path": self.folder.path_of(""),
            "number": manifest.number,
            "iteration": manifest.iteration,
            "created_s": manifest.created_s,
            "time_total_s": manifest.time_total_s,
            "world_size": manifest.world_size,
            "saved_by": "all ranks" if manifest.all_ranks else "rank 0",
            "num_bytes": self.num_bytes,
            "metrics": manifest.metrics,
        }

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entries in self.manifest.parts.values() for entry in entries)


def find_checkpoint(given: str, storage_path: str) -> Found:
    """Return the checkpoint in a folder, or the newest one of a run.

    Raises:
        ConfigError: There is none.
    """
    from raysgd.checkpoint.store import CheckpointStore, read_manifest

    folder = existing_folder(given)
    if folder.exists("manifest.json"):
        return Found(folder, read_manifest(folder))
    run = _run_of(given, folder, storage_path)
    store = CheckpointStore(run.child("checkpoints"))
    if not (manifests := store.list()):
        raise ConfigError(
            f"the run {run_name(run)} has no checkpoint that can be read; give another run, or a checkpoint."
        )
    return Found(store.directory(manifests[-1].number), manifests[-1])


def _run_of(given: str, folder: Storage, storage_path: str) -> Storage:
    if folder.exists() and newest_run(folder) is None:
        raise ConfigError(
            f"{given} is neither a checkpoint nor the folder of a run: it has no manifest.json and no run.json."
        )
    return find_run(given, storage_path)


@click.group("ckpt", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show, check, merge and export checkpoints.

    CHECKPOINT is the folder of a checkpoint, or a run, for its newest one. RUN is a folder, or a name in the storage path.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


# -- ls ----------------------------------------------------------------------------------------------------------------


@command.command("ls", short_help="List the checkpoints of a run.")
@run_argument()
@storage_flag
@json_flag
def list_command(run: str, storage_path: str, as_json: bool) -> int:
    """List the checkpoints of RUN, oldest first. Damaged ones are named; `verify` also reads the files."""
    from raysgd.callbacks.values import metrics_text

    folder = find_run(run, storage_path)
    found, damaged = _read_all(folder)
    if as_json:
        print_json([each.to_json() for each in found])
    elif found:
        rows = [
            (
                each.folder.name,
                each.manifest.iteration,
                metrics_text(each.manifest.metrics) or None,
                each.manifest.world_size,
                _in_size(each.num_bytes),
                age(each.manifest.created_s),
            )
            for each in found
        ]
        columns = ("checkpoint", "iteration", "metrics", "workers", "size", "age")
        print_table(columns, rows, right=("iteration", "workers", "size", "age"))
    else:
        print_error(f"the run {folder.path_of('')} has no checkpoints.")
    for error in damaged.values():
        print_error(f"damaged: {error}")
    return FAILED if damaged else SUCCEEDED


def _read_all(run: Storage) -> tuple[list[Found], dict[str, str]]:
    """Read the manifests of a run's checkpoints; return them, and what is wrong with those that are damaged, by path."""
    from raysgd.checkpoint.store import CheckpointStore

    store = CheckpointStore(run.child("checkpoints"))
    found: list[Found] = []
    damaged: dict[str, str] = {}
    for number in store.numbers():
        try:
            found.append(Found(store.directory(number), store.read(number)))
        except CheckpointNotFoundError:  # it is being written, or its run was lost meanwhile
            continue
        except CheckpointError as error:
            damaged[store.directory(number).path_of("")] = str(error)
    return found, damaged


def _in_size(num_bytes: int) -> str:
    from raysgd._util.text import in_bytes

    if num_bytes >= 10 << 20:
        return in_bytes(num_bytes)
    return f"{num_bytes / 1024:,.0f} KiB" if num_bytes >= 10 << 10 else f"{num_bytes} B"


# -- show --------------------------------------------------------------------------------------------------------------


@command.command("show", short_help="Show metrics, files and arrays of a checkpoint.")
@run_argument("checkpoint")
@storage_flag
@json_flag
def show_command(checkpoint: str, storage_path: str, as_json: bool) -> int:
    """Show what is in CHECKPOINT: its metrics, its files, and its arrays with their types and shapes."""
    found = find_checkpoint(checkpoint, storage_path)
    files: list[dict[str, Any]] = [
        {"rank": rank, "name": entry.name, "num_bytes": entry.size, "crc32": entry.crc32}
        for rank, entries in sorted(found.manifest.parts.items())
        for entry in entries
    ]
    arrays = [] if found.manifest.is_files else list(_arrays(found))
    if as_json:
        print_json({**found.to_json(), "files": files, "arrays": arrays})
        return SUCCEEDED
    print_table(("", ""), _facts(found))
    print()
    print_table(("rank", "file", "size"), [(one["rank"], one["name"], _in_size(one["num_bytes"])) for one in files])
    if arrays:
        print()
        rows = [(one["name"], one["dtype"], "x".join(map(str, one["shape"])), one["saved_by"]) for one in arrays]
        print_table(("array", "type", "shape", "saved by"), rows)
    return SUCCEEDED


def _facts(found: Found) -> list[tuple[str, Any]]:
    from raysgd.callbacks.values import duration, metrics_text

    manifest = found.manifest
    return [
        ("checkpoint", found.folder.path_of("")),
        ("saved", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_s))),
        ("iteration", manifest.iteration),
        ("training", duration(manifest.time_total_s)),
        ("workers", f"{manifest.world_size}, saved by {'all ranks' if manifest.all_ranks else 'rank 0'}"),
        ("size", _in_size(found.num_bytes)),
        ("metrics", metrics_text(manifest.metrics) or None),
    ]


def _arrays(found: Found) -> Iterator[dict[str, Any]]:
    """Yield the arrays of a checkpoint, of which only headers are read."""
    from raysgd.checkpoint.format.parts import StoredPart

    parts = {rank: StoredPart(found.folder, entries) for rank, entries in found.manifest.parts.items() if entries}
    sharded: dict[str, list[int]] = {}
    for rank, part in sorted(parts.items()):
        for name in part.shards:
            sharded.setdefault(name, []).append(rank)
    for name, ranks in sharded.items():
        array = parts[ranks[0]].shards[name]
        kind = array.dtype if isinstance(array.dtype, str) else str(array.dtype)
        yield {"name": name, "dtype": kind, "shape": list(array.shape), "saved_by": f"{len(ranks)} ranks in shards"}
    for rank, part in sorted(parts.items()):
        for name in part.unsharded_names:
            spec = part.specs[name]
            yield {"name": name, "dtype": spec.dtype, "shape": list(spec.shape), "saved_by": f"rank {rank}"}


# -- verify ------------------------------------------------------------------------------------------------------------


@command.command("verify", short_help="Compare all files with their checksums.")
@run_argument("checkpoint")
@storage_flag
@json_flag
def verify_command(checkpoint: str, storage_path: str, as_json: bool) -> int:
    """Read all files of CHECKPOINT, or of all checkpoints of a run, and compare them with their checksums.

    Exit status 1 if one is damaged, 2 if there is none.
    """
    from raysgd.checkpoint.format.manifest import verify_files
    from raysgd.checkpoint.store import read_manifest

    folder = existing_folder(checkpoint)
    problems: dict[str, str] = {}
    if folder.exists("manifest.json"):
        found: list[Found] = []
        try:
            found = [Found(folder, read_manifest(folder))]
        except CheckpointError as error:
            problems[folder.path_of("")] = str(error)
    else:
        run = _run_of(checkpoint, folder, storage_path)
        found, problems = _read_all(run)
        if not found and not problems:
            raise ConfigError(f"the run {checkpoint} has no checkpoint, so there is nothing to verify.")
    states = {}
    for each in found:
        try:
            verify_files(each.folder, each.manifest, checksums=True)
            states[each.folder.path_of("")] = "whole"
        except CheckpointError as error:
            problems[each.folder.path_of("")] = str(error)
    if as_json:
        print_json({"whole": list(states), "damaged": problems})
    else:
        for path in states:
            print(f"whole    {path}")
        for path, problem in problems.items():
            print(f"damaged  {path}: {problem}")
    return FAILED if problems else SUCCEEDED


# -- merge and export --------------------------------------------------------------------------------------------------


@command.command("merge", short_help="Write whole arrays in one part.")
@run_argument("checkpoint")
@click.argument("folder")
@click.option("--allow-pickle", is_flag=True, help=_PICKLE)
@storage_flag
@json_flag
def merge_command(checkpoint: str, folder: str, allow_pickle: bool, storage_path: str, as_json: bool) -> int:
    """Write CHECKPOINT, which ranks saved in shards, as one with whole arrays in one part, to a folder in FOLDER.

    Any number of workers can start from it, and `raysgd.Checkpoint.from_path(...).load()` reads it. The whole state must
    fit into the memory of this machine.
    """
    from raysgd.session.merging import merge_parts

    found = find_checkpoint(checkpoint, storage_path)
    path = merge_parts(found.folder, found.manifest, Storage.from_uri(folder), allow_pickle=allow_pickle)
    if as_json:
        print_json({"path": path})
    else:
        print(path)
    return SUCCEEDED


@command.command("export", short_help="Write the model as safetensors files.")
@run_argument("checkpoint")
@click.argument("folder")
@click.option("--key", default="model", show_default=True, help="Where the model's state dict lies in the state.")
@click.option("--whole-state", is_flag=True, help="The saved state itself is the model's state dict.")
@click.option("--dtype", metavar="TYPE", help="Type of floating point tensors, such as bfloat16 (default: as saved).")
@click.option("--max-shard-bytes", type=whole_number(1), default=5_000_000_000, help="Bytes of the tensors in a file.")
@click.option("--allow-pickle", is_flag=True, help=_PICKLE)
@storage_flag
@json_flag
def export_command(
    checkpoint: str,
    folder: str,
    key: str,
    whole_state: bool,
    dtype: str | None,
    max_shard_bytes: int,
    allow_pickle: bool,
    storage_path: str,
    as_json: bool,
) -> int:
    """Write the model in CHECKPOINT as safetensors files, which transformers and others load, to the new FOLDER."""
    found = find_checkpoint(checkpoint, storage_path)
    from raysgd.torch.exporting import export

    export(
        found.folder.uri,
        folder,
        key=None if whole_state else key,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        allow_pickle=allow_pickle,
    )
    target = Storage.from_uri(folder)
    files = [{"name": name, "num_bytes": target.size(name)} for name in target.list_names()]
    if as_json:
        print_json({"folder": target.uri, "files": files})
    else:
        print_table(("file", "size"), [(one["name"], _in_size(int(str(one["num_bytes"])))) for one in files])
    return SUCCEEDED
