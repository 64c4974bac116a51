"""Compare training by raysgd.functions with a loop written by hand with JAX, and with redco.

    python benchmarks/functions.py [--quick] [--redco FOLDER] [--output FOLDER]

All train the same model in the same workers and in turns, on CPUs. FOLDER has redco: `pip install --no-deps --target FOLDER
redco`. Writes functions.json and functions.md to doc/benchmarks, or to build/benchmarks with --quick. It takes eight minutes at
most. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from bench.machine import ROOT, describe_machine, without_paths
from bench.results import median_ratio, rounded, spread_of_ratio
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of time, waiting for data; seconds for the order of `NUM_SHUFFLED` rows; milliseconds of a call of train() beyond its steps.
WAIT_LIMIT, SHUFFLE_LIMIT_S, CALL_LIMIT_MS = 0.02, 0.1, 5
NUM_SHUFFLED = 1_000_000


@dataclass(frozen=True)
class Case:
    """A model on some devices, and the target: a step of raysgd takes at most ``limit`` times that of the loop ``than``."""

    model: str
    limit: float
    than: str = "by_hand"
    workers: int = 1
    devices: int = 1
    shards: int = 1
    rounds: int = 12
    steps: int = 300


CASES = {
    "small, 1 device": Case("small", 1 / 0.95, "redco"),
    "small, 2 devices": Case("small", 1, "redco", devices=2),
    "small, 2 workers": Case("small", 1.15, workers=2),
    "perceptron, 2 devices": Case("perceptron", 1.03, devices=2, rounds=10, steps=30),
    "perceptron, 4 devices, 2 model shards": Case("perceptron", 1.03, devices=4, shards=2, rounds=10, steps=30),
    "transformer, 1 device": Case("transformer", 1.03, rounds=8, steps=5),
}
LOOPS = {"by_hand": "by hand", "by_hand_again": "by hand, again", "raysgd": "raysgd.functions", "redco": "redco"}
PARTS = {
    "collate": "collate a batch",
    "place": "place it on the devices",
    "step": "the compiled step",
    "collective": "its gradients' collective alone",
    "report": "report metrics",
}
#: Steps of each call of train(), and calls.
CALL_STEPS, NUM_CALLS = 10, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it all work?")
    parser.add_argument("--redco", type=Path, help="the folder that has redco")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"measured": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        document["steps"] = measure_steps(Path(folder), args.quick, args.redco)
    document["shuffle_s"] = measure_shuffle(args.quick)
    document["machine"] = describe_machine(("jax", "jaxlib", "optax"))
    document["redco"] = None if args.redco is None else _version_of_redco(args.redco)
    (output / "functions.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "functions.md").write_text(page, encoding="utf-8")
    print(page)


def _version_of_redco(folder: Path) -> str:
    return next(folder.glob("redco-*.dist-info")).name.removeprefix("redco-").removesuffix(".dist-info")


# -- the measures --------------------------------------------------------------------------------------------------------


def measure_steps(folder: Path, quick: bool, redco: Path | None) -> dict[str, Any]:
    """Take the time of a step of every loop, in every case."""
    import ray

    os.environ.update(RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        return {name: _measure_case(folder, case, quick, redco) for name, case in CASES.items()}
    finally:
        ray.shutdown()


def _measure_case(folder: Path, case: Case, quick: bool, redco: Path | None) -> dict[str, Any]:
    from bench import functions_loops as loops

    import raysgd
    from raysgd.functions import Deployer, Trainer

    rounds, steps = (2, 4) if quick else (case.rounds, case.steps)
    model, rows = loops.MODELS[case.model]
    examples = model.make_examples(steps * rows)
    config = {
        "model": case.model,
        "shards": case.shards,
        "rows": rows,
        "steps": steps,
        "redco": str(redco),
        "repeats": 3 if quick else 100,
    }
    files = raysgd.RunConfig(storage_path=folder / "runs")
    per_device = rows * case.shards // (case.workers * case.devices)
    has_redco = redco is not None and case.workers == 1 and case.model != "transformer"
    taken: dict[str, list[float]] = {name: [] for name in LOOPS if name != "redco" or has_redco}
    waits: list[float] = []
    missing: dict[str, str] = {}
    found: dict[str, Any] = {}
    with Deployer(
        0,
        case.shards,
        num_workers=case.workers,
        devices_per_worker=case.devices,
        verbose=False,
        run_config=files,
        cpus_per_worker=2 / case.workers,
    ) as deployer:
        loss_fn, optimizer = loops.LossOf(case.model), loops.make_optimizer()
        trainer = Trainer(deployer, loops.collate_fn, loss_fn=loss_fn, params=model.make_params(), optimizer=optimizer)

        def run_by_hand(seed: int) -> list[float]:
            return _run(deployer, loops.train_by_hand, {**config, "seed": seed})

        def run_raysgd(seed: int) -> list[float]:
            result = trainer.fit(examples, per_device_batch_size=per_device, n_epochs=1)
            assert result.num_compilations["train"] == 0, result.num_compilations
            rows = raysgd.load_run(str(result.run_dir)).metrics
            rows = rows[rows["loss"].notna()]  # one for each step; the last one is of the epoch
            waits.append(float(rows["data_wait_fraction"].iloc[1:].mean()))
            return list(rows["timestamp"])

        def run_redco(seed: int) -> list[float]:
            return _run(deployer, loops.train_with_redco, config)

        run = {"by_hand": run_by_hand, "by_hand_again": run_by_hand, "raysgd": run_raysgd, "redco": run_redco}
        tail = examples[: max(1, rows // 3)]
        first = trainer.fit(examples + tail, per_device_batch_size=per_device, n_epochs=1)
        run_by_hand(0)
        if has_redco:
            try:
                run_redco(0)
            except Exception as error:
                missing["redco"] = without_paths(f"{type(error).__name__}: {error}").splitlines()[0]
                del taken["redco"]
        wait_for_calm()
        for number in range(rounds):
            for name in random.Random(number).sample(list(taken), len(taken)):
                times = run[name](number)
                taken[name].append(1000 * (times[-1] - times[0]) / (len(times) - 1))
        if case.model == "small":
            found["parts"] = deployer.runs.run(loops.time_parts, config, {"unused": [{"x": 0}]})
            found["call_ms"] = _measure_calls(trainer, examples[: CALL_STEPS * rows], per_device, quick)
    return {
        "ms": {name: [rounded(each) for each in times] for name, times in taken.items()},
        "steps": steps,
        "shapes": 2,
        "compilations": first.num_compilations["train"],
        "data_wait_fraction": rounded(statistics.median(waits)),
        "missing": missing,
        **found,
    }


def _measure_calls(trainer: Any, examples: list[Any], per_device: int, quick: bool) -> list[float]:
    """Return the milliseconds of each call of train() in a loop, once the workers keep the state between calls."""
    taken = []
    for _ in range(3):
        trainer.train(examples, per_device_batch_size=per_device)
    for _ in range(2 if quick else NUM_CALLS):
        begin = time.perf_counter()
        trainer.train(examples, per_device_batch_size=per_device)
        taken.append(rounded(1000 * (time.perf_counter() - begin)))
    return taken


def _run(deployer: Any, train_func: Any, config: dict[str, Any]) -> list[float]:
    return list(deployer.runs.run(train_func, config, {"unused": [{"x": 0}]}))


def measure_shuffle(quick: bool) -> list[float]:
    """Return the seconds that the whole order of an epoch takes."""
    from raysgd.data.order.epoch_order import EpochOrder

    seconds = []
    for epoch in range(2 if quick else 15):
        begin = time.perf_counter()
        rows = EpochOrder([NUM_SHUFFLED], seed=0, epoch=epoch, shuffle="full").rows(range(NUM_SHUFFLED))
        seconds.append(rounded(time.perf_counter() - begin))
        assert len(np.unique(rows)) == NUM_SHUFFLED
    return seconds


# -- the page ------------------------------------------------------------------------------------------------------------


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    machine, steps = document["machine"], document["steps"]
    rows, notes = [], []
    for name, found in steps.items():
        case, taken = CASES[name], found["ms"]
        cells = [_cell(taken, loop) for loop in LOOPS]
        spread = spread_of_ratio(taken["by_hand_again"], taken["by_hand"])
        met, target = "not measured", f"at most {case.limit:.2f} of {LOOPS[case.than]}"
        if case.than in taken:
            met = say_met(median_ratio(taken["raysgd"], taken[case.than]) <= max(case.limit, 1 + spread))
        rows.append([name, *cells, f"{spread:.3f}", f"{target}: {met}"])
        notes += [f"{LOOPS[loop]}, {name}: {why}" for loop, why in found["missing"].items()]
    small = {name: found for name, found in steps.items() if "parts" in found}
    parts = [
        [text, *(f"{found['parts']['ms'][part]:.2f} ms" for found in small.values())] for part, text in PARTS.items()
    ]
    collectives = [
        [
            f"collectives of a step, {LOOPS[loop]}",
            *(str(found["parts"]["collectives"][loop]) for found in small.values()),
        ]
        for loop in ("raysgd", "by_hand")
    ]
    calls = [_call_overhead_ms(found) for found in small.values()]
    compiled = ", ".join(f"{found['compilations']} for {found['shapes']} shapes" for found in steps.values())
    wait = max(found["data_wait_fraction"] for found in steps.values())
    shuffle = statistics.median(document["shuffle_s"])
    redco = (
        "redco is not measured here."
        if document["redco"] is None
        else f"redco {document['redco']} is from PyPI, and is measured in one process."
    )
    return "\n".join(
        [
            "# JAX models by functions",
            "",
            "<!-- Written by benchmarks/functions.py; changes made here are lost. -->",
            "",
            "Training by [raysgd.functions](../guides/functions.md), and a loop written by hand with `jax.jit`: the same model, "
            "AdamW,",
            "batches that are collated as they are needed, the same shardings. By hand, each process collates the rows of its ",
            "own devices.",
            "Two workers are two processes of plain JAX: `jax.distributed` with gloo. Devices are virtual ones, on "
            f"{machine['cores']} cores",
            f"({machine['processor']}), {machine['memory_gib']} GiB; "
            + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            + ".",
            "",
            "## Time of a step",
            "",
            "Medians over rounds, in each of which every loop makes an epoch in random order, in the same processes; in",
            "brackets the ratio to the loop by hand. raysgd also reports each step's metrics. " + redco,
            "A target is also met within the spread of the loop by hand against itself: the larger of that ratio's distance from",
            "1 and half the range that holds its median with a probability of 95 %.",
            "",
            "- small: a perceptron of 9,000 parameters, 64 rows in a batch",
            "- perceptron: 0.5 million parameters, 256 rows",
            "- transformer: 19 million parameters, 4 rows of 32 tokens",
            "",
            make_table(["", *LOOPS.values(), "spread", "target"], rows),
            "",
            *(f"- {note}" for note in notes),
            *([""] if notes else []),
            "## Where the time of a step goes",
            "",
            "Medians of each part alone, until its result is there. Batches are collated in another thread, while a step runs.",
            "",
            make_table(["", *small], [*parts, *collectives]),
            "",
            f"A call of `train()` in a loop of one's own, with {CALL_STEPS} steps, beyond the time of these steps. Target: at "
            f"most {CALL_LIMIT_MS} ms.",
            "",
            make_table(
                ["", *small],
                [["train()", *(f"{each:.1f} ms: {say_met(each <= CALL_LIMIT_MS)}" for each in calls)]],
            ),
            "",
            "## Compilations, data, order",
            "",
            f"- Compilations of the training step: {compiled} (a batch and a tail); none in any later fit.",
            f"- Time in which steps wait for data, `data_wait_fraction`: {100 * wait:.1f} % at most; the target is below "
            f"{100 * WAIT_LIMIT:.0f} %: {say_met(wait < WAIT_LIMIT)}.",
            f"- The order of an epoch of {NUM_SHUFFLED:,} rows takes {shuffle:.3f} s; the target is {SHUFFLE_LIMIT_S} s: "
            f"{say_met(shuffle <= SHUFFLE_LIMIT_S)}.",
            "",
            f"Measured on {document['measured']}; the load average was {document['load']} when it began.",
            "",
            "```console",
            "$ python benchmarks/functions.py",
            "```",
            "",
        ]
    )


def _call_overhead_ms(found: dict[str, Any]) -> float:
    return statistics.median(found["call_ms"]) - CALL_STEPS * statistics.median(found["ms"]["raysgd"])


def _cell(taken: dict[str, list[float]], loop: str) -> str:
    if loop not in taken:
        return "-"
    return f"{statistics.median(taken[loop]):.2f} ms ({median_ratio(taken[loop], taken['by_hand']):.3f})"


if __name__ == "__main__":
    main()
