"""``raysgd ckpt``: checkpoints are listed, shown, checked, merged and exported, and damaged ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import raysgd
from raysgd.checkpoint.checkpoint import Checkpoint
from raysgd.checkpoint.codecs.shards import ShardWriter
from raysgd.checkpoint.format.manifest import Manifest
from raysgd.checkpoint.format.parts import write_payload
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.checkpoint.storage.storage import Storage
from raysgd.checkpoint.store import CheckpointStore, part_prefix
from raysgd.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run ``raysgd ckpt`` in this process, in a temporary folder; return its exit status, output and error output."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["ckpt", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    place = tmp_path / "runs" / "exp" / "run_001"
    with raysgd.local(dir=place / "checkpoints"):
        for step in (1, 2):
            model = torch.nn.Linear(3, 2)
            raysgd.save_checkpoint(
                {"step": step, "model": model, "scales": [torch.ones(4)]}, metrics={"loss": 1 / step}
            )
    (place / "run.json").write_text("{}")
    return place


def checkpoint(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"checkpoint_{number:06d}"


def damage(folder: Path, number: int) -> Path:
    """Change a byte of a checkpoint's tensors."""
    (path,) = checkpoint(folder, number).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def save_in_shards(folder: Path, states: list[dict[str, object]], *, is_reshardable: bool = True) -> Path:
    """Write checkpoint 7 of ranks that each have a part."""
    store = CheckpointStore(Storage.from_uri(folder))
    parts = {}
    for rank, state in enumerate(states):
        snapshot = take_snapshot(state, StagingPool(1), allow_pickle=False, shards=ShardWriter(len(states)))
        parts[rank] = write_payload(snapshot.payload(), store.directory(7), part_prefix(1, rank))
        snapshot.release()
    manifest = Manifest(
        number=7,
        attempt=1,
        iteration=12,
        time_total_s=3.5,
        world_size=len(states),
        created_s=100.0,
        metrics={"loss": 0.5, "val": {"acc": 0.25}},
        all_ranks=True,
        is_reshardable=is_reshardable,
        parts=parts,
        rank_states={rank: {"position": rank} for rank in range(len(states))},
    )
    return Path(store.commit(manifest))


# -- ls, show ----------------------------------------------------------------------------------------------------------


def test_ls_shows_the_checkpoints_of_a_run(run: Run, folder: Path) -> None:
    status, out, err = run("ls", "exp", "--storage-path", "runs")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["checkpoint", "iteration", "metrics", "workers", "size", "age"]
    assert [row[:4] for row in rows[2:]] == [
        ["checkpoint_000001", "0", "loss=1.0", "1"],
        ["checkpoint_000002", "0", "loss=0.5", "1"],
    ]
    found = json.loads(run("ls", str(folder), "--json")[1])
    assert [(one["number"], one["metrics"]) for one in found] == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert found[0]["num_bytes"] == sum(
        path.stat().st_size for path in checkpoint(folder, 1).iterdir() if path.name != "manifest.json"
    )


def test_ls_names_a_damaged_manifest(run: Run, folder: Path) -> None:
    (checkpoint(folder, 1) / "manifest.json").write_text("{}")
    status, out, err = run("ls", str(folder))
    assert status == 1 and "checkpoint_000002" in out and "checkpoint_000001" not in out
    assert err.startswith("damaged: ") and "checkpoint_000001/manifest.json" in err


@pytest.mark.parametrize("is_run", [True, False])
def test_show_lists_files_and_arrays(run: Run, folder: Path, is_run: bool) -> None:
    given = str(folder) if is_run else str(checkpoint(folder, 2))
    shown = json.loads(run("show", given, "--json")[1])
    assert (shown["number"], shown["world_size"], shown["saved_by"]) == (2, 1, "rank 0")
    assert [(one["name"], one["dtype"], one["shape"]) for one in shown["arrays"]] == [
        ("model.weight", "F32", [2, 3]),
        ("model.bias", "F32", [2]),
        ("scales.0", "F32", [4]),
    ]
    assert {Path(one["name"]).suffix for one in shown["files"]} == {".json", ".safetensors"}
    out = run("show", given)[1]
    assert "model.weight" in out and "2x3" in out and "loss=0.5" in out


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_finds_a_changed_byte(run: Run, folder: Path) -> None:
    assert run("verify", str(folder))[0] == 0
    path = damage(folder, 1)
    status, out, _ = run("verify", "exp", "--storage-path", "runs")
    assert status == 1
    whole, damaged = sorted(out.splitlines(), reverse=True)
    assert whole == f"whole    {checkpoint(folder, 2)}"
    assert damaged.startswith(f"damaged  {checkpoint(folder, 1)}: {path} does not match its checksum")
    assert run("verify", str(checkpoint(folder, 2)))[0] == 0
    shown = json.loads(run("verify", str(folder), "--json")[1])
    assert shown["whole"] == [str(checkpoint(folder, 2))] and list(shown["damaged"]) == [str(checkpoint(folder, 1))]


def test_verify_finds_a_damaged_manifest(run: Run, folder: Path) -> None:
    (checkpoint(folder, 2) / "manifest.json").write_text("{}")
    for given in (str(folder), str(checkpoint(folder, 2))):
        status, out, _ = run("verify", given)
        assert status == 1 and f"damaged  {checkpoint(folder, 2)}: " in out
        assert "is not the manifest of a raysgd checkpoint" in out


# -- merge, export -----------------------------------------------------------------------------------------------------


def test_merge_writes_whole_arrays_in_one_part(run: Run, tmp_path: Path, group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(12.0).reshape(4, 3)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    place = save_in_shards(tmp_path / "shards", [{"model": {"w": sharded}, "step": 5}])
    status, out, err = run("merge", str(place), "merged")
    assert (status, out, err) == (0, f"{tmp_path}/merged/checkpoint_000007\n", "")
    assert "loss=0.5  val/acc=0.25" in run("show", out.strip())[1]
    merged = Checkpoint.from_path(out.strip())
    assert (merged.iteration, merged.metrics, merged.time_total_s) == (12, {"loss": 0.5, "val": {"acc": 0.25}}, 3.5)
    state = merged.load()
    assert state["step"] == 5 and torch.equal(state["model"]["w"], whole)
    shown = json.loads(run("show", out.strip(), "--json")[1])
    assert (shown["saved_by"], [one["saved_by"] for one in shown["arrays"]]) == ("rank 0", ["rank 0"])
    assert run("verify", out.strip())[0] == 0
    status, _, err = run("merge", str(place), "merged")
    assert status == 2 and "checkpoint_000007 exists; give another folder" in err


def test_merge_refuses_what_one_part_cannot_hold(run: Run, tmp_path: Path) -> None:
    place = save_in_shards(tmp_path / "shards", [{"rank": 0}, {"rank": 1}], is_reshardable=False)
    status, _, err = run("merge", str(place), "merged")
    assert status == 2 and "its ranks saved different values" in err
    (tmp_path / "mine").mkdir()
    with raysgd.local(dir=tmp_path / "files"):
        raysgd.save_checkpoint(tmp_path / "mine", files=True)
    status, _, err = run("merge", str(tmp_path / "files" / "checkpoint_000001"), "merged")
    assert status == 2 and "was saved with files=True" in err
    assert not (tmp_path / "merged").exists()


def test_export_writes_the_model(run: Run, folder: Path, tmp_path: Path) -> None:
    status, out, _ = run("export", "exp", "model", "--storage-path", "runs", "--dtype", "bfloat16")
    assert status == 0 and "model.safetensors" in out
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    state = Checkpoint.from_path(checkpoint(folder, 2)).load()["model"]
    assert tensors.keys() == state.keys()
    assert torch.equal(tensors["weight"], state["weight"].bfloat16())


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["export", "exp", "model", "--key", "net"], 1, "has no state['net']: it holds 'step', 'model', 'scales'"),
        (["export", "exp", "runs"], 2, "it exists and is not an empty folder"),
        (["export", "exp", "model", "--dtype", "int3"], 2, "is not a floating point type of torch"),
        (["show", "nothing"], 2, "there is no run nothing"),
        (["show", "runs/empty"], 2, "has no checkpoint that can be read"),
        (["verify", "runs/empty"], 2, "has no checkpoint, so there is nothing to verify"),
        (["verify", "."], 2, ". is neither a checkpoint nor the folder of a run"),
        (["shwo", "exp"], 2, "No such command 'shwo'"),
        (["show"], 2, "Missing argument 'CHECKPOINT'"),
    ],
)
def test_mistake_is_explained(run: Run, folder: Path, words: list[str], status: int, text: str) -> None:
    empty = folder.parents[1] / "empty" / "run_001"
    empty.mkdir(parents=True)
    (empty / "run.json").write_text("{}")
    found = run(*words, *(["--storage-path", "runs"] if len(words) > 1 else []))
    assert found[0] == status and text in found[2]
