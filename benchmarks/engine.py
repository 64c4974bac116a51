"""Compare the engine with loops written by hand, with Accelerate and Fabric, and its checkpoints with torch's.

    python benchmarks/engine.py [--quick] [--only PART ...] [--output FOLDER]

All systems run in the same processes and take turns. Writes engine.json and engine.md to doc/benchmarks, or to
build/benchmarks with --quick; with --only, the other parts of an earlier run stay. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench.faults import Training
from bench.machine import ROOT, describe_machine
from bench.results import median_ratio, rounded, spread_of_ratio
from bench.steps import read_marks
from bench.systems.base import wait_for_calm
from bench.systems.fragile import FragileRaysgd
from bench.table import make_table, say_met

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of a step, to the loop by hand; of bytes, to theory; of a save's stall, to DCP's; seconds from a kill to the next step.
STEP_LIMIT, BYTES_LIMIT, STALL_LIMIT, KILL_LIMIT_S = 1.02, 1.03, 0.3, 0.8
#: Of the plan's prediction, to measured bytes.
STATE_LIMIT, ACTIVATIONS_LIMIT = 0.03, 0.2
CASES = {
    "ddp": "DDP",
    "bf16": "DDP, bf16 autocast",
    "accumulation": "DDP, 4 batches per step",
    "fsdp2": "FSDP2",
    "fsdp2_tp": "FSDP2 and tensor parallel, 2 x 2 ranks",
}
LOOPS = {
    "by_hand": "by hand",
    "by_hand_again": "by hand, again",
    "engine": "engine",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
}
#: A model of 1.07 GB for checkpoints; for kills one whose training state takes 100 MB.
LARGE, SMALL = {"width": 4096, "layers": 16}, {"width": 1024, "layers": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it all work?")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), help="parts to measure")
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), help="measure the steps of these cases; the others stay"
    )
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "engine.json"
    parts = json.loads(file.read_text())["parts"] if args.only and file.exists() else {}
    if args.cases:
        args.only = ["steps"]
        parts = json.loads(file.read_text())["parts"]
    for name in args.only or PARTS:
        load = round(os.getloadavg()[0], 1)
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[name](Path(folder), args.quick, *([args.cases] if args.cases else []))
        if args.cases:
            kept = {key: {"measured": parts[name]["measured"], **case} for key, case in parts[name]["cases"].items()}
            found["cases"] = {**kept, **found["cases"]}
        parts[name] = {"measured": date.today().isoformat(), "load": load, **found}
        machine = describe_machine(("transformers", "accelerate", "lightning_fabric", "pytorch-lightning"))
        file.write_text(json.dumps({"machine": machine, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    page = render(json.loads(file.read_text()))
    (output / "engine.md").write_text(page, encoding="utf-8")
    print(page)


# -- the parts -----------------------------------------------------------------------------------------------------------


@contextmanager
def _trainer(folder: Path, num_workers: int, **settings: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a train function and returns what rank 0 returned."""
    import raysgd

    files = raysgd.RunConfig(storage_path=folder / "runs")
    with raysgd.Trainer(num_workers, "torch", run_config=files, **settings) as trainer:

        def run(train_func: Callable[..., Any], config: dict[str, Any], **more: Any) -> Any:
            wait_for_calm()
            quiet = [raysgd.callbacks.ProgressCallback(mode="off")]
            return trainer.run(train_func, config, callbacks=quiet, **more), trainer

        yield run


@contextmanager
def _cluster(num_cpus: int) -> Iterator[None]:
    import ray

    os.environ.update(RAY_worker_niceness="0", OMP_NUM_THREADS="1")
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def measure_steps(folder: Path, quick: bool, names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """Take the time of a step of every loop, in every case."""
    from bench.engine_loops import measure_steps as train_func

    cases = {}
    rounds, steps = (2, 1) if quick else (25, 3)
    with _cluster(8):
        for case in names:
            tensor_parallel = case == "fsdp2_tp"
            settings = {"workers_per_replica": 2} if tensor_parallel else {}
            with _trainer(folder, 4 if tensor_parallel else 2, **settings) as run:
                config = {"case": case, "rounds": rounds, "steps": steps}
                cases[case], _ = run(train_func, config)
            print(
                case,
                {name: round(statistics.median(times), 1) for name, times in cases[case]["ms"].items()},
                flush=True,
            )
    for found in cases.values():
        found["ms"] = {name: [rounded(each) for each in times] for name, times in found["ms"].items()}
    return {"cases": cases, "steps": steps}


def measure_bytes(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure what each stage of ZeRO holds on a rank."""
    from bench.engine_loops import measure_bytes as train_func

    found = {}
    with _cluster(8):
        for num_ranks in (2, 4):
            with _trainer(folder, num_ranks) as run:
                found[str(num_ranks)], _ = run(train_func, {})
    return {"ranks": found}


def measure_saves(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure saves of a large sharded model, and loads on another number of ranks."""
    from bench.engine_saves import measure_load
    from bench.engine_saves import measure_saves as train_func

    import raysgd

    shape = {"width": 1024, "layers": 4} if quick else LARGE
    repetitions, loads = (2, 1) if quick else (9, 5)
    files = folder / "dcp"
    keep = raysgd.CheckpointConfig(num_to_keep=1)
    with _cluster(8):
        with _trainer(folder, 2, checkpoint_config=keep) as run:
            saves, trainer = run(train_func, {**shape, "repetitions": repetitions, "folder": str(files)})
            newest = trainer.get_last_checkpoint()
        with _trainer(folder, 4) as run:
            config = {**shape, "folder": str(files / str(repetitions))}
            taken = [run(measure_load, {**config, "seed": seed}, resume_from=newest)[0] for seed in range(loads + 1)]
    return {"saves": saves, "loads": taken[1:]}


def measure_kills(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure from the kill of a rank to the next step; an elastic group of two with a spare, saved every 5 steps."""
    from bench.engine_saves import train

    system = FragileRaysgd("raysgd_spare", folder)
    system.start({"num_cpus": 4, "num_workers": (1, 2), "num_spares": 1})
    seconds: list[float] = []
    loads: list[float] = []
    try:
        with Training(system, limit_s=90, save_every=5, train=train, config=SMALL) as training:
            for _ in range(2 if quick else 10):
                group = training.wait_for_whole(2)
                sent = training.send_signal(group)
                seconds.append(training.wait_after(group, 2).first_step - sent)
                files = sorted(training.folder.glob("load-*"), key=lambda path: int(path.name.split("-")[2]))
                loads.append(max(float(path.read_text()) for path in files[-2:]))
            marks = [read_marks(path) for path in training.folder.glob("*.steps")]
    finally:
        system.close()
    steps = [(last - first) / (number - 1) for first, last, number in marks if number > 1]
    return {"seconds": seconds, "loads": loads, "step_s": statistics.median(steps)}


def measure_plan(folder: Path, quick: bool) -> dict[str, Any]:
    """Predict and measure the memory of eight models under many strategies."""
    from bench.engine_plan import measure_plan as train_func

    chosen = {"models": ["GPT-2", "MLP"], "strategies": ["ZeRO-2", "ZeRO-1, tensor x2"]} if quick else {}
    cases: list[dict[str, Any]] = []
    with _cluster(8):
        for num_ranks in (2, 4):
            with _trainer(folder, num_ranks) as run:
                cases += run(train_func, chosen)[0]
    return {"cases": cases}


PARTS = {
    "steps": measure_steps,
    "bytes": measure_bytes,
    "plan": measure_plan,
    "saves": measure_saves,
    "kills": measure_kills,
}


# -- the page ------------------------------------------------------------------------------------------------------------


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    machine, parts = document["machine"], document["parts"]
    versions = machine["versions"]
    lines = [
        "# The engine",
        "",
        "<!-- Written by benchmarks/engine.py; changes made here are lost. -->",
        "",
        "The engine, and the same strategies written by hand with torch and with other libraries, in the same processes and",
        f"in turns, on {machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". There was no GPU; ranks talk over gloo.",
        "",
    ]
    for name, part in ((name, parts[name]) for name in PARTS if name in parts):
        lines += _RENDERED[name](part)
        lines += [f"Measured on {part['measured']}; the load average was {part['load']} when it began.", ""]
    lines += ["```console", "$ python benchmarks/engine.py", "```", ""]
    return "\n".join(lines)


def _render_steps(part: dict[str, Any]) -> list[str]:
    rows, notes = [], []
    for case, found in part["cases"].items():
        taken = found["ms"]
        median = {name: statistics.median(times) for name, times in taken.items()}
        ratio = {name: median_ratio(times, taken["by_hand"]) for name, times in taken.items()}
        cells = [f"{median[name]:.1f} ms ({ratio[name]:.3f})" if name in taken else "-" for name in LOOPS]
        spread = spread_of_ratio(taken["by_hand_again"], taken["by_hand"])
        peers = [ratio[name] for name in ("accelerate", "fabric") if name in ratio]
        is_met = ratio["engine"] <= max(STEP_LIMIT, 1 + spread) and ratio["engine"] <= min(peers, default=2.0) + spread
        rows.append([CASES[case], *cells, f"{spread:.3f}", say_met(is_met)])
        notes += [f"{LOOPS[name]}, {CASES[case]}: {why}" for name, why in found["missing"].items()]
    number, steps = len(next(iter(part["cases"].values()))["ms"]["engine"]), part["steps"]
    return [
        "## Time of a step",
        "",
        "A LLaMA of 5 million parameters in fp32, 4 sequences of 128 tokens on each rank, AdamW. Medians, in brackets the ratio",
        f"to the loop by hand (the median over {number} rounds, in each of which every loop makes {steps} steps, in random",
        "order).",
        f"Target: at most {STEP_LIMIT}, or within the spread of the loop by hand against itself, and not slower than the best",
        "other library, within that spread too. The spread is the larger of that ratio's distance from 1 and half the range",
        "that holds its median with a probability of 95 %.",
        "",
        make_table(["", *LOOPS.values(), "spread", "target"], rows),
        "",
        *(
            f"- {CASES[key]}: measured on {case['measured']}."
            for key, case in part["cases"].items()
            if "measured" in case
        ),
        *(f"- {note}." for note in notes),
        *([""] if notes else []),
    ]


def _render_bytes(part: dict[str, Any]) -> list[str]:
    rows, worst = [], 0.0
    for ranks, found in part["ranks"].items():
        whole = found["theory"]["parameters"]
        for stage in range(4):
            held = found[str(stage)]
            share = {
                "parameters": whole / (int(ranks) if stage == 3 else 1),
                "gradients": whole / (int(ranks) if stage >= 2 else 1),
                "optimizer": 2 * whole / (int(ranks) if stage >= 1 else 1),
            }
            ratios = {name: held[name] / share[name] for name in share}
            if stage:
                worst = max(worst, sum(held.values()) / sum(share.values()))
            cells = [f"{held[name] / 1e6:.2f} MB ({ratios[name]:.3f})" for name in share]
            rows.append([ranks, str(stage), *cells, f"{sum(held.values()) / sum(share.values()):.3f}"])
    return [
        "## Bytes per rank",
        "",
        "The training state of rank 0 with AdamW in fp32; in brackets the ratio to what the stage of ZeRO promises.",
        "",
        make_table(["ranks", "`zero_stage`", "parameters", "gradients", "optimizer", "all"], rows),
        "",
        f"- Target: at most {BYTES_LIMIT} of it for stages 1 to 3. The largest ratio is {worst:.3f}: "
        f"{say_met(worst <= BYTES_LIMIT)}.",
        "",
    ]


def _render_plan(part: dict[str, Any]) -> list[str]:
    cases = [one for one in part["cases"] if "measured" in one]
    limits = {"parameters": STATE_LIMIT, "gradients": STATE_LIMIT, "optimizer": STATE_LIMIT}
    limits["kept_activations"] = ACTIVATIONS_LIMIT
    rows, missed = [], []
    for model in dict.fromkeys(one["model"] for one in cases):
        own = [one for one in cases if one["model"] == model]
        cells = []
        for kind, limit in limits.items():
            errors = [_deviation(one["predicted"][kind], one["measured"][kind]) for one in own]
            worst = max(errors, key=abs)
            cells.append(f"{100 * worst:+.1f} %")
            missed += [
                f"{model}, {one['strategy']}, {one['ranks']} ranks: {kind.replace('_', ' ')} of "
                f"{one['measured'][kind] / 1e6:.3f} MB are predicted as {one['predicted'][kind] / 1e6:.3f} MB"
                for one, error in zip(own, errors, strict=True)
                if abs(error) > limit
            ]
        rows.append([model, str(len(own)), *cells])
    others: dict[str, list[str]] = {}
    for one in part["cases"]:
        if "refused" in one:
            others.setdefault(f"{one['strategy']} is refused for", []).append(one["model"])
        elif "failed" in one:
            others.setdefault(f"{one['strategy']} fails ({one['failed']}) for", []).append(one["model"])
    return [
        "## The plan's predictions",
        "",
        "What `raysgd.engine.predict_memory` predicts of the rank that needs most, against what `engine.memory()` and",
        "`engine.measure_activations()` measure there, for small models on 2 and 4 ranks with AdamW: ZeRO 0 to 3, accumulation,",
        "recomputation, bf16, `bf16-true`, tensor and pipeline parallelism. The largest relative deviation of each kind:",
        "",
        make_table(["model", "cases", "parameters", "gradients", "optimizer", "kept activations"], rows),
        "",
        f"- Target: at most {100 * STATE_LIMIT:.0f} % for parameters, gradients and optimizer state, "
        f"{100 * ACTIVATIONS_LIMIT:.0f} % for kept activations: {say_met(not missed)}.",
        *(f"- Missed: {one}." for one in missed),
        *(f"- {what} {', '.join(dict.fromkeys(models))}." for what, models in others.items()),
        "",
        "A pipeline's last stage drops the logits, which the plan counts, and the plan assigns what the caller of the blocks",
        "holds for a while to the first stage. With ZeRO-3 and bf16, FSDP gathers all weights in bf16, so that hidden states are",
        "in bf16 too; the plan has them in fp32, as autocast alone does. In these cases it predicts too much.",
        "",
    ]


def _deviation(predicted: float, measured: float) -> float:
    """Return the relative deviation; of less than a kilobyte there is none."""
    return 0.0 if abs(predicted - measured) < 1000 else predicted / measured - 1


def _render_saves(part: dict[str, Any]) -> list[str]:
    saves, loads = part["saves"], part["loads"]
    size = saves["bytes"]
    stall, whole = (
        {name: statistics.median(each[what] for each in saves[name]) for name in ("raysgd", "dcp")}
        for what in ("stall", "whole")
    )
    load = {name: statistics.median(each[name] for each in loads) for name in ("raysgd", "dcp")}
    names = {"raysgd": "raysgd", "dcp": "DCP, `async_save`"}
    rows = [
        [
            names[name],
            f"{1000 * stall[name]:.0f} ms",
            f"{size / whole[name] / 1e6:.0f} MB/s",
            f"{load[name]:.2f} s",
        ]
        for name in names
    ]
    ratios = {
        name: table["raysgd"] / table["dcp"] for name, table in (("stall", stall), ("whole", whole), ("load", load))
    }
    return [
        "## Checkpoints of a sharded model",
        "",
        f"A model of {size / 1e9:.2f} GB that FSDP2 has sharded over 2 ranks; both write to the same local disk. *Stall*: how",
        "long the slowest rank waits in the call. *Written*: until the checkpoint is complete, committed and listed. *Loaded*:",
        f"into the same model sharded over 4 ranks. Medians of {len(saves['raysgd'])} saves and {len(loads)} loads, in turns.",
        "",
        make_table(["", "stall", "written", "loaded"], rows),
        "",
        f"- Target: a stall of at most {STALL_LIMIT} of DCP's. It is {ratios['stall']:.2f}: "
        f"{say_met(ratios['stall'] <= STALL_LIMIT)}.",
        f"- Target: written as fast as by DCP. It takes {ratios['whole']:.2f} of its time: {say_met(ratios['whole'] <= 1)}.",
        f"- Target: loaded as fast as by DCP. It takes {ratios['load']:.2f} of its time: {say_met(ratios['load'] <= 1)}.",
        "",
        "A stall is a copy of each rank's half into a buffer that is reused. What a rank reads it compares with the checksums of",
        "the blocks that it is in; DCP has no checksums.",
        "",
    ]


def _render_kills(part: dict[str, Any]) -> list[str]:
    others = [took - load for took, load in zip(part["seconds"], part["loads"], strict=True)]
    seconds, load, without = (statistics.median(each) for each in (part["seconds"], part["loads"], others))
    return [
        "## A rank of an elastic FSDP2 group is killed",
        "",
        "`Trainer((1, 2))` with two ranks and a spare, a training state of 100 MB, saved every 5 steps; from the SIGKILL to the",
        f"next step of a whole group. Medians of {len(others)} kills.",
        "",
        make_table(
            ["kill to next step", "of it the reading of the state", "rest", "longest rest"],
            [[f"{seconds:.2f} s", f"{load:.2f} s", f"{without:.2f} s", f"{max(others):.2f} s"]],
        ),
        "",
        f"- Target: at most {KILL_LIMIT_S} s and the time of reading. The rest is {without:.2f} s: "
        f"{say_met(without <= KILL_LIMIT_S)}.",
        "",
        "The rest has the group's end and formation, and what train_func does until the end of its first step: it makes the",
        f"model, the engine shards it, and a step takes {part['step_s']:.2f} s in the middle of a run.",
        "",
    ]


_RENDERED = {
    "steps": _render_steps,
    "bytes": _render_bytes,
    "plan": _render_plan,
    "saves": _render_saves,
    "kills": _render_kills,
}


if __name__ == "__main__":
    main()
