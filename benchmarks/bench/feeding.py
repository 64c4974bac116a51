"""What the measures of feeding share: the data they write, and the loop that takes it. The loop runs in workers."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.notes import gather, note
from bench.systems.base import System

WIDTH = 64
BATCH = 1_024


def write_rows(folder: Path, num_rows: int, num_files: int) -> Path:
    """Parquet files of 64 float32 and an int64 in each row."""
    import numpy as np
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(num_files):
        rows = num_rows // num_files
        pq.write_table(make_table(rows, np.random.default_rng(number)), folder / f"{number:03}.parquet")
    return folder


def make_table(num_rows: int, rng: Any) -> Any:
    """``x``, a list of 64 float32, and ``y``, an int64."""
    import numpy as np
    import pyarrow as pa

    x = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(num_rows * WIDTH, np.float32)), WIDTH)
    return pa.table({"x": x, "y": pa.array(rng.integers(0, 10, num_rows))})


def write_images(folder: Path, count: int, num_files: int) -> Path:
    """Parquet files of JPEG images of 224 x 224 as bytes, and an int64."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(num_files):
        images = []
        for _ in range(count // num_files):
            small = Image.fromarray(rng.integers(0, 256, (28, 28, 3), np.uint8))
            data = io.BytesIO()
            small.resize((224, 224)).save(data, "JPEG")
            images.append(data.getvalue())
        table = pa.table({"image": images, "y": np.arange(len(images))})
        pq.write_table(table, folder / f"{number:03}.parquet")
    return folder


def decode(batch: dict[str, Any]) -> dict[str, Any]:
    """The images of a batch, decoded."""
    import numpy as np
    import torch
    from PIL import Image

    images = np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in batch["image"]])
    return {"image": torch.from_numpy(images), "y": torch.as_tensor(np.asarray(batch["y"]).copy())}


def measure_rates(system: System, params: dict[str, Any], dataset: Any) -> dict[str, list[float]]:
    """Rows a second of all workers together, for each epoch but the first."""
    return {"rows_per_s": rates_of_epochs(system, params, dataset)[1:]}


def rates_of_epochs(system: System, params: dict[str, Any], dataset: Any) -> list[float]:
    """Rows a second of all workers together, for each epoch of one run."""
    system.run(train, params, dataset=dataset)
    by_rank = gather(system.folder, "epochs")
    rates = []
    for epoch in zip(*by_rank, strict=True):
        starts, stops, rows = zip(*epoch, strict=True)
        if sum(rows) != params["rows"]:
            raise RuntimeError(f"{sum(rows)} rows of {params['rows']} came")
        rates.append(sum(rows) / (max(stops) - min(starts)))
    return rates


def train(config: dict[str, Any]) -> None:
    """Epochs that do nothing with their batches."""
    import torch.distributed as dist

    epoch_of = _loader(config)
    epochs = []
    for _ in range(config["epochs"]):
        dist.barrier()
        start, rows = time.time(), 0
        for batch in epoch_of():
            rows += len(batch["y"])
        epochs.append((start, time.time(), rows))
    note(config, "epochs", dist.get_rank(), epochs)


def _loader(config: dict[str, Any]) -> Callable[[], Iterator[dict[str, Any]]]:
    collate = decode if config.get("decodes") else None
    size = config.get("batch", BATCH)
    if config["system"] == "raysgd":
        import raysgd

        batches = raysgd.get_dataset().get_split().to_torch(size, collate_fn=collate)
        return lambda: iter(batches)
    import ray.train

    shard = ray.train.get_dataset_shard("train")
    return lambda: iter(shard.iter_torch_batches(batch_size=size, collate_fn=collate))


def quiet_ray_data() -> None:
    """Without progress bars and lines."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
