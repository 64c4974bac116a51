"""Train on a dataset of several gigabytes that is read during the training, with constant memory.

    python examples/05_large_dataset.py [--gigabytes 4] [--folder DIR] [--workers 2]

Writes Parquet files of random features with labels from a hidden linear rule, unless the folder has some already. A small network
learns the rule in one epoch. Each worker reads its own part of the files, in shuffled blocks with mixed rows. The program prints
how many rows were trained per second, how long the workers waited for data, and how much memory they used over time.
"""

# test: tests/docs/test_large_dataset.py

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from torch import nn

import raysgd

FEATURES = 256
ROWS_OF_A_FILE = 65_536  # 64 MB
REPORT_EVERY = 20  # steps


def write_files(folder: Path, gigabytes: float) -> None:
    """Write files of 64 MB, each of four row groups."""
    rule = np.random.default_rng(0).standard_normal(FEATURES).astype(np.float32)
    num_files = max(1, round(gigabytes * 2**30 / (4 * FEATURES * ROWS_OF_A_FILE)))
    for number in range(num_files):
        rng = np.random.default_rng(number + 1)
        features = rng.standard_normal((ROWS_OF_A_FILE, FEATURES), np.float32)
        columns = {
            "features": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), FEATURES),
            "label": pa.array((features @ rule > 0).astype(np.int8)),
        }
        path = folder / f"{number:05}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=ROWS_OF_A_FILE // 4, compression="none")


def train_func(config: dict) -> nn.Module:
    torch.manual_seed(0)
    model = raysgd.torch.prepare_model(nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = (
        raysgd.get_dataset()
        .get_split()
        .to_torch(batch_size=config["batch_size"], dtypes=torch.float32, shuffle="window", drop_last=True)
    )
    process, began, rows, right = psutil.Process(), time.monotonic(), 0, 0.0
    for step, batch in enumerate(batches, 1):
        logits = model(batch["features"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows += len(batch["label"]) * raysgd.world_size()
        right = 0.95 * right + 0.05 * ((logits > 0) == batch["label"]).float().mean().item()
        if step % REPORT_EVERY == 0 or step == len(batches):
            # The private memory of a process: the system can reclaim pages of files and of shared memory.
            memory = process.memory_full_info().uss
            raysgd.report(
                rows=rows,
                loss=loss.item(),
                accuracy=right / (1 - 0.95**step),
                rows_per_s=rows / (time.monotonic() - began),
                memory_mb=memory / 2**20,
            )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4, help="of the files that are written")
    parser.add_argument(
        "--folder", type=Path, help="where the files are, or go to; by default one that is removed at the end"
    )
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="raysgd-large-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        train(folder, args.gigabytes, args.workers)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


def train(folder: Path, gigabytes: float, workers: int) -> None:
    began = time.monotonic()
    if not list(folder.glob("*.parquet")):
        write_files(folder, gigabytes)
    sizes = [path.stat().st_size for path in folder.glob("*.parquet")]
    print(f"{len(sizes)} files, {sum(sizes) / 2**30:.2f} GB, after {time.monotonic() - began:.0f} s", flush=True)

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
    with raysgd.Trainer(workers, "torch", seed=0) as trainer:
        stream = trainer.run_generator(
            train_func,
            {"batch_size": 1024},
            dataset=folder,
            reduce={"memory_mb": "max", "data_wait_fraction": "max", "accuracy": "mean"},
        )
        results = list(stream)
        stream.get_returns()
        run_dir = trainer.run_dir
    last, rows = results[-1], results[-1]["rows"]
    memory = [result["memory_mb"] for result in results if result["rows"] >= 0.25 * rows]
    waits = sorted(result["data_wait_fraction"] for result in results)
    print(f"{rows:,} rows in one epoch, {last['rows_per_s']:,.0f} rows/s; accuracy {last['accuracy']:.4f}")
    print(f"waited for data: {100 * waits[len(waits) // 2]:.1f} % of the time (the slowest rank's, median)")
    print(f"memory of the largest worker, after a quarter of the epoch: {min(memory):,.0f} to {max(memory):,.0f} MB")
    print(f"run directory: {run_dir}")


if __name__ == "__main__":
    main()
