"""Compare training by raysgd.functions with a loop written by hand with JAX, and with redco.

    python benchmarks/functions.py [--quick] [--redco FOLDER] [--output FOLDER]

All train the same model with the same shardings, in the same worker and in turns, on virtual devices of the CPU. FOLDER has
redco: `pip install --no-deps --target FOLDER redco`. Writes functions.json and functions.md to doc/benchmarks, or to
build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from bench.machine import ROOT, describe_machine, without_paths
from bench.results import median_ratio, rounded, spread_of_ratio
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of a step, to the loop by hand; of time, waiting for data; seconds for the order of `NUM_SHUFFLED` rows.
STEP_LIMIT, WAIT_LIMIT, SHUFFLE_LIMIT_S = 1.03, 0.02, 0.1
NUM_SHUFFLED = 1_000_000
#: Devices and model shards of each case.
CASES = {
    "2 devices": {"devices": 2, "shards": 1},
    "4 devices, 2 model shards": {"devices": 4, "shards": 2},
}
LOOPS = {"by_hand": "by hand", "by_hand_again": "by hand, again", "raysgd": "raysgd.functions", "redco": "redco"}
#: Rows of a batch, and of the tail of the first fit.
ROWS, TAIL = 256, 40


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
    rounds, steps = (2, 4) if quick else (16, 40)
    try:
        return {name: _measure_case(folder, rounds, steps, redco, **case) for name, case in CASES.items()}
    finally:
        ray.shutdown()


def _measure_case(
    folder: Path, rounds: int, steps: int, redco: Path | None, *, devices: int, shards: int
) -> dict[str, Any]:
    from bench import functions_loops as loops

    import raysgd
    from raysgd.functions import Deployer, Trainer

    examples = loops.make_examples(steps * ROWS)
    config = {"shards": shards, "rows": ROWS, "examples": loops.Examples(len(examples)), "redco": str(redco)}
    files = raysgd.RunConfig(storage_path=folder / "runs")
    per_device = ROWS * shards // devices
    taken: dict[str, list[float]] = {name: [] for name in LOOPS if name != "redco" or redco is not None}
    waits: list[float] = []
    missing: dict[str, str] = {}
    with Deployer(
        0, shards, devices_per_worker=devices, verbose=False, run_config=files, cpus_per_worker=2
    ) as deployer:
        trainer = Trainer(deployer, loops.collate_fn, loops.loss_fn, loops.make_params(), loops.make_optimizer())

        def run_by_hand(seed: int) -> list[float]:
            return _run(deployer, loops.train_by_hand, {**config, "seed": seed})

        def run_raysgd(seed: int) -> list[float]:
            counts = trainer.fit(examples, per_device_batch_size=per_device, n_epochs=1).num_compilations
            assert counts["train"] == 0, counts
            rows = raysgd.load_run(str(deployer.runs.run_dir)).metrics
            rows = rows[rows["loss"].notna()]  # one for each step; the last one is of the epoch
            waits.append(float(rows["data_wait_fraction"].iloc[1:].mean()))
            return list(rows["timestamp"])

        def run_redco(seed: int) -> list[float]:
            return _run(deployer, loops.train_with_redco, config)

        run = {"by_hand": run_by_hand, "by_hand_again": run_by_hand, "raysgd": run_raysgd, "redco": run_redco}
        first = trainer.fit(examples + examples[:TAIL], per_device_batch_size=per_device, n_epochs=1)
        run_by_hand(0)
        if redco is not None:
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
    return {
        "ms": {name: [rounded(each) for each in times] for name, times in taken.items()},
        "steps": steps,
        "shapes": 2,
        "compilations": first.num_compilations["train"],
        "data_wait_fraction": rounded(statistics.median(waits)),
        "missing": missing,
    }


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
        taken = found["ms"]
        cells = [_cell(taken, loop) for loop in LOOPS]
        spread = spread_of_ratio(taken["by_hand_again"], taken["by_hand"])
        ratio = median_ratio(taken["raysgd"], taken["by_hand"])
        rows.append([name, *cells, f"{spread:.3f}", say_met(ratio <= max(STEP_LIMIT, 1 + spread))])
        notes += [f"{LOOPS[loop]}, {name}: {why}" for loop, why in found["missing"].items()]
    compiled = ", ".join(f"{found['compilations']} for {found['shapes']} shapes" for found in steps.values())
    wait = max(found["data_wait_fraction"] for found in steps.values())
    shuffle = statistics.median(document["shuffle_s"])
    one = next(iter(steps.values()))
    redco = (
        "redco is not measured here."
        if document["redco"] is None
        else f"redco {document['redco']} is from PyPI. The state of its optimizer is whole on each data-parallel device, so that "
        "it does not\ngather parameters after an update, and needs more memory; how much time that saves is not measured."
    )
    return "\n".join(
        [
            "# JAX models by functions",
            "",
            "<!-- Written by benchmarks/functions.py; changes made here are lost. -->",
            "",
            "Training by [raysgd.functions](../guides/functions.md), and a loop written by hand with `jax.jit`: the same model ",
            "(a perceptron of 0.5 million parameters), AdamW, batches of "
            f"{ROWS} examples that are collated as they are needed, the same",
            "shardings of parameters and of the optimizer's state. One worker with virtual devices, on "
            f"{machine['cores']} cores",
            f"({machine['processor']}), {machine['memory_gib']} GiB; "
            + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            + ".",
            "",
            "## Time of a step",
            "",
            f"Medians over {len(one['ms']['raysgd'])} rounds, in each of which every loop makes an epoch of {one['steps']} "
            "steps in random",
            "order, in the same process; in brackets the ratio to the loop by hand. raysgd also reports each step's metrics.",
            redco,
            f"Target: at most {STEP_LIMIT}, or within the spread of the loop by hand against itself: the larger of that ratio's",
            "distance from 1 and half the range that holds its median with a probability of 95 %.",
            "",
            make_table(["", *LOOPS.values(), "spread", "target"], rows),
            "",
            *(f"- {note}" for note in notes),
            *([""] if notes else []),
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


def _cell(taken: dict[str, list[float]], loop: str) -> str:
    if loop not in taken:
        return "-"
    return f"{statistics.median(taken[loop]):.2f} ms ({median_ratio(taken[loop], taken['by_hand']):.3f})"


if __name__ == "__main__":
    main()
