"""What a GPU changes without Ray: reports, checkpoints, batches, the choice of the device, process groups.

Most tests have a variant on the CPU, which shows that the test itself works.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.session_alone import SessionAlone

import raysgd
from raysgd.checkpoint.snapshot import StagingPool, take_snapshot
from raysgd.errors import ConfigError
from support.payloads import load_payload
from support.poll import until

ROOT = Path(__file__).resolve().parent.parent.parent
#: Where new processes find raysgd and `bench`.
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
GPU = pytest.mark.gpu

# -- reports -----------------------------------------------------------------------------------------------------------


def test_report_takes_scalars_of_the_moment_without_a_wait(
    session: SessionAlone, device: torch.device, no_waits: Callable[[], Any]
) -> None:
    loss = torch.ones((), device=device, requires_grad=True)
    with no_waits():
        raysgd.report(loss=loss, nested={"more": [loss.half(), loss.bfloat16(), (loss > 0), -loss]})
        with torch.no_grad():
            loss += 1
        raysgd.report(loss=loss, step=torch.tensor(3), view=torch.view_as_complex(loss.repeat(2)).conj().imag)
    assert session.reports() == [
        {"loss": 1.0, "nested": {"more": [1.0, 1.0, True, -1.0]}},
        {"loss": 2.0, "step": 3, "view": -2.0},
    ]


@GPU
def test_reported_scalar_is_read_before_later_steps_are_done(
    session: SessionAlone, keep_gpu_busy: Callable[[], Any]
) -> None:
    loss = torch.ones((), device="cuda")
    raysgd.report(loss=loss + 0)  # loads the kernels, which waits
    assert session.reports() == [{"loss": 1.0}]
    raysgd.report(loss=loss + 1)
    later = keep_gpu_busy()
    assert session.reports()[-1] == {"loss": 2.0}
    assert not later.query(), "the report was read only after a step that was queued later"


@GPU
def test_loop_that_runs_ahead_of_the_gpu_is_not_held_by_its_reports(session: SessionAlone) -> None:
    """Each report comes while the steps before it are still queued, as in any loop whose GPU is the bottleneck."""
    loss = torch.ones((), device="cuda")
    raysgd.report(loss=loss + 0, step=-1)  # loads the kernels and makes the slots, which waits
    session.reports()
    end = torch.cuda.Event()
    longest_s = 0.0
    for step in range(100):
        torch.cuda._sleep(10_000_000)  # clock cycles, some 6 ms: 0.6 s in all
        loss = loss + 1
        began = time.perf_counter()
        raysgd.report(loss=loss, step=step)
        longest_s = max(longest_s, time.perf_counter() - began)
    end.record()
    assert not end.query(), "the loop waited for the GPU"
    assert longest_s < 0.003, "a report waited for a step"
    assert [metrics["loss"] for metrics in session.reports()[1:]] == [2.0 + step for step in range(100)]


def test_loop_without_a_trainer_logs_its_scalars_in_order_without_a_wait(
    device: torch.device, no_waits: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    loss = torch.ones((), device=device)
    with raysgd.local(), no_waits():
        for step in range(3):
            raysgd.report(step=step, loss=loss + step)
        raysgd.report(step=3)
    assert until(lambda: len(caplog.messages) == 4, 20)
    assert caplog.messages == ["1: step=0  loss=1", "2: step=1  loss=2", "3: step=2  loss=3", "4: step=3"]


def test_checkpoint_of_a_loop_without_a_trainer_has_metrics_of_the_device(device: torch.device, tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path):
        raysgd.save_checkpoint({"x": 1}, metrics={"loss": torch.ones((), device=device) / 2})
    (folder,) = tmp_path.iterdir()
    assert raysgd.Checkpoint.from_path(folder).metrics == {"loss": 0.5}


@GPU
def test_memory_of_the_gpu_is_a_metric(session: SessionAlone) -> None:
    torch.cuda.reset_peak_memory_stats()
    held = torch.zeros(1 << 20, device="cuda")
    raysgd.report(allocated=torch.cuda.memory_allocated(), peak=torch.cuda.max_memory_allocated())
    (metrics,) = session.reports()
    assert metrics["peak"] >= metrics["allocated"] >= held.nbytes


# -- checkpoints -------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.T,
    "strided": lambda t: t[::2, 1:],
    "one element": lambda t: t[1, 2],
    "expanded": lambda t: t[:1].expand(5, -1),
    "channels last": lambda t: t.view(2, 2, 2, 3).to(memory_format=torch.channels_last),
    "complex": lambda t: torch.complex(t, -t),
    "conjugated": lambda t: torch.complex(t, -t).conj(),
    "negated": lambda t: torch.complex(t, -t).conj().imag,
    "nothing": lambda t: t[:0],
    "sparse": lambda t: t.to_sparse(),
}
DTYPES = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def bits(tensor: torch.Tensor) -> list[int]:
    if tensor.is_sparse:
        return [*bits(tensor.coalesce().indices()), *bits(tensor.coalesce().values())]
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_are_staged_bit_for_bit(device: torch.device) -> None:
    pattern = torch.arange(96, dtype=torch.uint8)
    state = {
        name: (pattern % 2 if name == "bool" else pattern).view(getattr(torch, name)).to(device) for name in DTYPES
    }
    state |= {name: make(torch.arange(24.0, device=device).view(4, 6)) for name, make in LAYOUTS.items()}
    state["parameter"] = torch.nn.Parameter(torch.rand(3, device=device))
    pool = StagingPool()
    for _ in range(3):  # buffers are used again
        snapshot = take_snapshot(state, pool)
        loaded = load_payload(snapshot.payload().copy())
        snapshot.release()
        for name, tensor in state.items():
            assert loaded[name].device.type == "cpu" and loaded[name].dtype == tensor.dtype, name
            assert loaded[name].shape == tensor.shape and bits(loaded[name]) == bits(tensor), name


def test_generator_is_restored_on_its_device(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(5)
    torch.rand(3, device=device, generator=generator)
    loaded = load_payload(take_snapshot({"generator": generator}, StagingPool()).payload().copy())["generator"]
    assert loaded.device.type == device.type
    drawn = [torch.rand(3, device=device, generator=each).tolist() for each in (generator, loaded)]
    assert drawn[0] == drawn[1]


def test_saved_states_are_those_of_their_calls(session: SessionAlone, device: torch.device) -> None:
    """The states are large enough for pinned memory that the writer prepares ahead."""
    model = torch.nn.Linear(2048, 2048, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.full((8, 2048), step + 1.0, device=device)) - 1).square().mean().backward()
        optimizer.step()
        expected.append(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        raysgd.save_checkpoint({"step": step, "model": model, "optimizer": optimizer})
        with torch.no_grad():  # queued right behind the copies
            for parameter in model.parameters():
                parameter.fill_(step / 10)
    for step, (saved, original) in enumerate(zip(session.saved(), expected, strict=True)):
        assert saved["step"] == step
        for name, value in original["model"].items():
            assert torch.equal(saved["model"][name], value.cpu()), (step, name)
        for key, state in original["optimizer"]["state"].items():
            momentum = saved["optimizer"]["state"][key]["momentum_buffer"]
            assert torch.equal(momentum, state["momentum_buffer"].cpu()), (step, key)


@GPU
def test_staging_memory_is_page_locked(session: SessionAlone) -> None:
    gpu = torch.device("cuda", 0)
    pool = StagingPool(num_buffers=2)
    buffers = [pool.acquire(32 << 20, gpu=gpu)]
    writer = threading.Thread(target=pool.prefault, args=(32 << 20,))  # prepares the other one
    writer.start()
    writer.join()
    buffers.append(pool.acquire(32 << 20, gpu=gpu))
    assert [torch.from_numpy(buffer.view).is_pinned() for buffer in buffers] == [True, True]


class PowerCutError(Exception):
    pass


def train(steps: int, device: torch.device, stops_at: int | None = None) -> list[int]:
    """Train with dropout, whose draws are those of the device's generator; return the weights' bits."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = 0
    if state := raysgd.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.randn(32, 16, device=device)).square().mean().backward()
        optimizer.step()
        raysgd.save_checkpoint({"step": step, "model": model, "optimizer": optimizer})
        if step == stops_at:
            raise PowerCutError
    return [bit for parameter in model.parameters() for bit in bits(parameter)]


def test_resumed_training_is_bit_identical(device: torch.device, tmp_path: Path) -> None:
    with raysgd.local(dir=tmp_path / "whole"):
        whole = train(6, device)
    with raysgd.local(dir=tmp_path / "cut"):
        with pytest.raises(PowerCutError):
            train(6, device, stops_at=2)
        torch.rand(5, device=device)  # a new process would be elsewhere, too
        assert train(6, device) == whole


# -- data --------------------------------------------------------------------------------------------------------------


def rows(count: int, width: int = 4) -> dict[str, Any]:
    x = np.arange(count * width, dtype=np.float32).reshape(count, width)
    return {"x": x, "y": np.arange(count)}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_come_to_the_device_in_order(device: torch.device, no_waits: Callable[[], Any], prefetch: int) -> None:
    with raysgd.local(dataset=rows(100)):
        split = raysgd.get_dataset().get_split()
        with no_waits():
            batches = list(split.to_torch(16, device=device, prefetch=prefetch))
    assert {value.device.type for batch in batches for value in batch.values()} == {device.type}
    assert [len(batch["y"]) for batch in batches] == [16] * 6 + [4]
    for name, column in rows(100).items():
        assert np.array_equal(torch.cat([batch[name] for batch in batches]).cpu().numpy(), column)


@GPU
def test_batches_are_copied_while_the_gpu_computes(keep_gpu_busy: Callable[[], Any]) -> None:
    data = rows(4096, width=256)
    other = torch.cuda.Stream()
    with raysgd.local(dataset=data):
        loader = raysgd.get_dataset().get_split().to_torch(1024, device="cuda")
        assert sum(len(batch["x"]) for batch in loader) == 4096  # now there is memory for all batches
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        computing = keep_gpu_busy()
        second = next(batches)["x"]

        def has_arrived() -> bool:
            with torch.cuda.stream(other):  # the loop's own stream computes
                return np.array_equal(second.cpu().numpy(), data["x"][1024:2048])

        assert until(has_arrived, 0.3, interval_s=0.01)
        assert not computing.query(), "the batch came only after the work that was queued before it"
        assert sum(len(batch["x"]) for batch in batches) == 2048


def test_prepared_loader_and_model_use_the_device_of_the_process() -> None:
    device = raysgd.device()
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(20, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=device.type == "cuda")
    model = raysgd.torch.prepare_model(torch.nn.Linear(1, 1))
    seen = []
    for (x,) in raysgd.torch.prepare_data_loader(loader):
        assert x.device == model(x).device == device
        seen += x.flatten().tolist()
    assert seen == list(range(20))


# -- the choice of the device ------------------------------------------------------------------------------------------


@GPU
def test_worker_uses_the_gpu_that_it_was_given(session: SessionAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSGD_DEVICE_INDEX", raising=False)
    assert raysgd.device() == torch.device("cpu"), "a worker without a GPU took one"
    last = torch.cuda.device_count() - 1
    monkeypatch.setenv("RAYSGD_DEVICE_INDEX", str(last))
    assert torch.ones(2, device=raysgd.device()).device == torch.device("cuda", last)
    monkeypatch.setenv("RAYSGD_DEVICE_INDEX", str(last + 1))
    with pytest.raises(ConfigError, match=f"from 0 to {last}"):
        raysgd.device()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )


#: As a worker does: load the framework, then set the GPUs, then train.
AS_A_WORKER = """
import os, sys
from pathlib import Path
from raysgd.backends.torch import TorchConfig

backend = TorchConfig().make_backend()
backend.load()
backend.warm_up()
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["WANTED"]
os.environ["RAYSGD_DEVICE_INDEX"] = "0"

import torch
import raysgd
from bench.session_alone import SessionAlone

with SessionAlone(Path(os.devnull)):
    print(torch.ones(2, device=raysgd.device()).sum().item(), raysgd.device(), torch.cuda.device_count())
"""


def gpu_names() -> list[str]:
    """Return the names of the GPUs, or if there are any of the MIG devices, as CUDA_VISIBLE_DEVICES takes them."""
    if shutil.which("nvidia-smi") is None:
        return [f"GPU-{torch.cuda.get_device_properties(0).uuid}"]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    names = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listed)
    return [name for name in names if name.startswith("MIG-")] or names


@GPU
def test_gpus_that_are_set_after_the_framework_was_loaded_are_used() -> None:
    mine = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    done = run_python(AS_A_WORKER, CUDA_VISIBLE_DEVICES="", WANTED=mine)
    assert done.stdout.split() == ["2.0", "cuda:0", "1"], done.stderr


@GPU
def test_gpu_is_used_by_its_name() -> None:
    done = run_python(AS_A_WORKER, CUDA_VISIBLE_DEVICES="", WANTED=gpu_names()[0])
    assert done.stdout.split() == ["2.0", "cuda:0", "1"], done.stderr


@GPU
@pytest.mark.parametrize("name", ["MIG-00000000-0000-0000-0000-000000000000", "GPU-ffffffff", "99"])
def test_name_of_no_gpu_is_refused(name: str) -> None:
    done = run_python(AS_A_WORKER, CUDA_VISIBLE_DEVICES="", WANTED=name)
    assert done.returncode == 1 and done.stdout == ""
    assert re.search(rf"ConfigError: this worker was given a GPU, but CUDA sees none of .*'{name}'", done.stderr)


# -- process groups ----------------------------------------------------------------------------------------------------


def run_members(world_size: int, device: str, folder: Path) -> list[list[dict[str, Any]]]:
    """Return what each member of a group printed, by rank."""
    for number in range(2):
        (folder / f"attempt-{number}").mkdir()
    # As the worker gets it: the backend sets this where psutil is installed.
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cuda":
        environment["RAYSGD_DEVICE_INDEX"] = "0"
    script = Path(__file__).with_name("member.py")
    members = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), device, folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [member.communicate(timeout=90) for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0] * world_size, "\n".join(error for _, error in outputs)
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_two_workers_on_one_device_train_over_gloo(device: torch.device, tmp_path: Path) -> None:
    first, second = run_members(2, device.type, tmp_path)
    alone = train_alone()
    for mine, theirs in zip(first, second, strict=True):
        assert mine["group"] == theirs["group"] == "gloo"
        assert mine["device"] == theirs["device"] == ("cuda:0" if device.type == "cuda" else "cpu")
        assert mine["where"] == theirs["where"] == [mine["device"]]
        assert mine["total"] == theirs["total"] == [3.0] * 3
        assert mine["weights"] == theirs["weights"], "the ranks have different models"
        for weights, expected in zip(mine["weights"], alone, strict=True):
            assert np.allclose(weights, expected, atol=1e-5), "not the model that one process trains on all rows"
        assert len(mine["losses"]) == 3 and mine["losses"] != theirs["losses"]
        assert mine["last"] == theirs["last"] != []
        assert mine["left"] and theirs["left"]


def train_alone() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 4, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@GPU
def test_nccl_group_of_one_process_forms_again_and_again(tmp_path: Path) -> None:
    (found,) = run_members(1, "cuda", tmp_path)
    for attempt in found:
        assert (attempt["group"], attempt["device"], attempt["total"]) == ("nccl", "cuda:0", [1.0] * 3)
        assert "nccl:all_reduce" in attempt["last"], "the flight recorder of nccl was not read"
        assert attempt["left"]
