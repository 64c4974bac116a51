"""Measure what reports and checkpoints cost a training loop on a GPU, in a run of a Trainer, or without Ray where there is none.

    python benchmarks/gpu.py [--quick] [--output FOLDER]

Writes gpu.json and gpu.md to doc/benchmarks, or to build/benchmarks with --quick, which also runs on a CPU. Needs torch, NumPy
and pyarrow. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # raysgd, where it is not installed

import torch
from bench import results
from bench.machine import ROOT, describe_machine
from bench.measures.gpu import GPU_STEP
from bench.pages.gpu import PAGE
from bench.session_alone import SessionAlone
from bench.table import fill_rows

PUBLISHED, SCRATCH = ROOT / "doc" / "benchmarks", ROOT / "build" / "benchmarks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, also without a GPU: does it all work?")
    parser.add_argument("--output", type=Path, help="folder for the results")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.quick:
        sys.exit("torch sees no GPU here, so nothing was measured.")
    output = args.output or (SCRATCH if args.quick else PUBLISHED)
    output.mkdir(parents=True, exist_ok=True)
    document = results.new_document(describe_machine())
    if has_gpu:
        document["machine"]["gpu"] = torch.cuda.get_device_name()
        document["machine"]["versions"]["cuda"] = torch.version.cuda
    today = date.today().isoformat()
    results.begin_measure(document, GPU_STEP.name, GPU_STEP.title, GPU_STEP.units, quick=args.quick, measured=today)
    with TemporaryDirectory(dir=output) as work:
        for system in GPU_STEP.systems:
            params = {
                **GPU_STEP.params(system, args.quick),
                "device": "cuda" if has_gpu else "cpu",
                "with_ray": has_ray(),
            }
            series = measure(system, params, Path(work))
            results.add_samples(document, GPU_STEP.name, system, params, {"series": series})
    document["rows"] = fill_rows(document, PAGE.rows)
    results.save(document, output / f"{PAGE.stem}.json")
    (output / PAGE.file_name).write_text(PAGE.render(document), encoding="utf-8")
    print(PAGE.render(document))
    print(output / PAGE.file_name)


def has_ray() -> bool:
    try:
        import ray  # noqa: F401
    except ImportError:
        return False
    return True


def measure(system: str, params: dict[str, Any], work: Path) -> dict[str, list[float]]:
    """Return the samples of a system by series."""
    if system != "raysgd":
        return GPU_STEP.run(system, params)
    if not params["with_ray"]:
        with SessionAlone(work):
            return GPU_STEP.run(system, params)
    import ray

    import raysgd

    # Workers find raysgd and these measures there.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    num_gpus = int(params["device"] != "cpu")
    ray.init(address="local", num_cpus=2, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    run_config, keep = raysgd.RunConfig(storage_path=work), raysgd.CheckpointConfig(num_to_keep=2)
    with raysgd.Trainer(1, gpus_per_worker=num_gpus, run_config=run_config, checkpoint_config=keep) as trainer:
        quiet = [raysgd.callbacks.ProgressCallback(mode="off")]
        series: dict[str, list[float]] = trainer.run(train, {"system": system, "params": params}, callbacks=quiet)
    ray.shutdown()
    return series


def train(config: dict[str, Any]) -> dict[str, list[float]]:
    return GPU_STEP.run(config["system"], config["params"])


if __name__ == "__main__":
    main()
