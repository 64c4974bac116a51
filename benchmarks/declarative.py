"""Compare a step of a training by a YAML file with one of the same loop written by hand.

    python benchmarks/declarative.py [--quick] [--output FOLDER]

Two workers take both loops in turns, run after run, with the same model, data and metrics. Writes declarative.json and
declarative.md to doc/benchmarks, or to build/benchmarks with --quick. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from bench.declarative_loops import LEARNING_RATE, LOOPS, train_by_hand
from bench.machine import ROOT, describe_machine
from bench.results import median_ratio, rounded, spread_of_ratio
from bench.systems.base import wait_for_calm
from bench.table import make_table, say_met

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"
#: Of a step's time to that of the loop by hand.
LIMIT = 1.03
NUM_WORKERS = 2
#: Rows of a worker's batch.
BATCH = 64
FILE = f"""\
compute_config: {{runtime_ngpus: {NUM_WORKERS}}}
micro_batch_size: {BATCH}
seed: 0
model: {{type: bench.declarative_loops.Model}}
optimizer: {{type: torch.optim.SGD, args: {{lr: {LEARNING_RATE}}}}}
dataset: {{type: bench.declarative_loops.Images}}
checkpoint: {{no_save: true}}
hook: {{type: bench.declarative_loops.Clock}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"measured": date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        document["steps"] = measure_steps(Path(folder), args.quick)
    document["machine"] = describe_machine(("torch",))
    (output / "declarative.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    page = render(document)
    (output / "declarative.md").write_text(page, encoding="utf-8")
    print(page)


def measure_steps(folder: Path, quick: bool) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each epoch, by loop."""
    import ray

    import raysgd
    from raysgd.callbacks import ProgressCallback
    from raysgd.declarative import load_args
    from raysgd.declarative.args import as_values
    from raysgd.declarative.entry import Training

    os.environ.update(RAY_worker_niceness="0")
    ray.init(address="local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    rounds, steps, epochs = (1, 4, 2) if quick else (12, 60, 4)
    config = {"rows": BATCH, "size": steps * BATCH * NUM_WORKERS, "epochs": epochs}
    path, clock = folder / "job.yaml", folder / "clock.json"
    path.write_text(FILE, encoding="utf-8")
    words = [
        "--max_epochs",
        str(epochs),
        "--dataset.train_args.size",
        str(config["size"]),
        "--hook.args.path",
        str(clock),
    ]
    values = as_values(load_args(path, words))
    training = Training({}, raysgd.EngineConfig(), str(Path(__file__).parent))
    taken: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    quiet = [ProgressCallback(mode="off")]
    try:
        files = raysgd.RunConfig(storage_path=folder / "runs")
        with raysgd.Trainer(NUM_WORKERS, backend="torch", seed=0, run_config=files) as trainer:
            wait_for_calm()
            for number in range(-1, rounds):
                for loop in random.Random(number).sample(list(LOOPS), len(LOOPS)):
                    if loop == "declared":
                        trainer.run(training, values, callbacks=quiet)
                        found = json.loads(clock.read_text(encoding="utf-8"))
                    else:
                        found = trainer.run(train_by_hand, config, callbacks=quiet)
                    if number >= 0:  # the first round warms up
                        taken[loop] += found
    finally:
        ray.shutdown()
    return {loop: [rounded(each) for each in times] for loop, times in taken.items()}


def render(document: dict[str, Any]) -> str:
    """Return the page."""
    machine, taken = document["machine"], document["steps"]
    spread = spread_of_ratio(taken["by_hand_again"], taken["by_hand"])
    ratio = median_ratio(taken["declared"], taken["by_hand"])
    cells = [
        f"{statistics.median(taken[loop]):.2f} ms ({median_ratio(taken[loop], taken['by_hand']):.3f})" for loop in LOOPS
    ]
    return "\n".join(
        [
            "# Training by a file",
            "",
            "<!-- Written by benchmarks/declarative.py; changes made here are lost. -->",
            "",
            "A step of a [training by a YAML file](../guides/declarative.md), and one of the same loop written by hand with",
            "`prepare_model` and `prepare_data_loader`, which reports the same metrics: the MLP of the [comparison](index.md),",
            f"SGD, {BATCH} rows a worker, {NUM_WORKERS} workers with one thread each, on {machine['cores']} cores "
            f"({machine['processor']}); "
            + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
            + ".",
            "",
            f"Medians over {len(taken['by_hand'])} epochs, in runs that alternate on the same workers; in brackets the ratio",
            f"to the first loop. Target: at most {LIMIT}, or within the spread of the loop by hand against itself.",
            "",
            make_table(
                ["", *LOOPS.values(), "spread", "target"],
                [["mlp", *cells, f"{spread:.3f}", say_met(ratio <= max(LIMIT, 1 + spread))]],
            ),
            "",
            f"Measured on {document['measured']}; the load average was {document['load']} when it began.",
            "",
            "```console",
            "$ python benchmarks/declarative.py",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
