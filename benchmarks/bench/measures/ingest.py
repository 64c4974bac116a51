"""The rate of rows in a training loop that does nothing with them. The loop runs in workers."""

from __future__ import annotations

import io
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.measures.base import Measure
from bench.systems.base import System
from bench.worker import gather, note

WIDTH = 64
BATCH = 1_024


def write_rows(folder: Path, num_rows: int, num_files: int) -> Path:
    """Write Parquet files with 64 float32 and an int64 in each row."""
    import numpy as np
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(num_files):
        rows = num_rows // num_files
        pq.write_table(make_table(rows, np.random.default_rng(number)), folder / f"{number:03}.parquet")
    return folder


def make_table(num_rows: int, rng: Any) -> Any:
    """Return a table with ``x``, a list of 64 float32, and ``y``, an int64."""
    import numpy as np
    import pyarrow as pa

    x = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(num_rows * WIDTH, np.float32)), WIDTH)
    return pa.table({"x": x, "y": pa.array(rng.integers(0, 10, num_rows))})


def write_images(folder: Path, count: int, num_files: int) -> Path:
    """Write Parquet files with JPEG images of 224 x 224 as bytes, and an int64."""
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
    """Decode the images of a batch."""
    import numpy as np
    import torch
    from PIL import Image

    images = np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in batch["image"]])
    return {"image": torch.from_numpy(images), "y": torch.as_tensor(np.asarray(batch["y"]).copy())}


def measure_rates(system: System, params: dict[str, Any], dataset: Any) -> dict[str, list[float]]:
    """Return the rows per second of all workers together, for each epoch except the first."""
    return {"rows_per_s": rates_of_epochs(system, params, dataset)[1:]}


def rates_of_epochs(system: System, params: dict[str, Any], dataset: Any) -> list[float]:
    """Return the rows per second of all workers together, for each epoch of one run."""
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
    """Read epochs, and do nothing with the batches."""
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
    """Switch off the progress bars and lines of Ray Data."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _params_of_ingest_files(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 4}


def run_ingest_files(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Read a million rows of 64 float32 and an int64 from 16 Parquet files, in batches of 1,024, with two workers.

    Plain pyarrow is one process with two threads that only reads each file and cuts it into slices of 1,024 rows. raysgd reads
    files that fit into its workers' memory once for all epochs of a run. So the main series has first epochs, each of its own
    run in warm workers; later epochs have another series.
    """
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    if system.name == "pyarrow":
        return {"rows_per_s": [_read_plainly(folder, params["rows"]) for _ in range(params["epochs"])][1:]}
    if system.name == "raysgd":
        once = params | {"epochs": 1}
        first = [rates_of_epochs(system, once, folder)[0] for _ in range(params["epochs"])]
        return {"rows_per_s": first[1:], "held_rows_per_s": rates_of_epochs(system, params, folder)[1:]}
    import ray.data

    quiet_ray_data()
    return measure_rates(system, params, ray.data.read_parquet(str(folder)))


def _read_plainly(folder: Path, num_rows: int) -> float:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pa.set_cpu_count(2)
    start, rows = time.perf_counter(), 0
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path)
        for first in range(0, table.num_rows, BATCH):
            rows += table.slice(first, BATCH).num_rows
    assert rows == num_rows
    return rows / (time.perf_counter() - start)


INGEST_FILES = Measure(
    name="ingest_files",
    title="From Parquet files",
    systems=("ray_train", "pyarrow", "raysgd"),
    quick_systems=("pyarrow", "raysgd"),
    units={"rows_per_s": "/s", "held_rows_per_s": "/s"},
    repeat=3,
    params=_params_of_ingest_files,
    run=run_ingest_files,
)


def _params_of_ingest_memory(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 6}


def run_ingest_memory(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Read a million rows of 64 float32 and an int64 from the object store, in batches of 1,024, with two workers."""
    return measure_rates(system, params, _dataset(system, params))


def _dataset(system: System, params: dict[str, Any]) -> Any:
    if system.name == "raysgd":
        import numpy as np

        return make_table(params["rows"], np.random.default_rng(0))
    import ray.data

    quiet_ray_data()
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    return ray.data.read_parquet(str(folder)).materialize()


INGEST_MEMORY = Measure(
    name="ingest_memory",
    title="From memory",
    systems=("ray_train", "raysgd"),
    quick_systems=("raysgd",),
    units={"rows_per_s": "/s"},
    repeat=3,
    params=_params_of_ingest_memory,
    run=run_ingest_memory,
)


def _params_of_ingest_transformed(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 16_384 if quick else 2**20, "files": 16, "epochs": 2 if quick else 4}


def run_ingest_transformed(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Read a million rows of Parquet files through a transformation of Ray Data, which runs while the two workers read."""
    import ray.data

    quiet_ray_data()
    folder = write_rows(system.folder / "rows", params["rows"], params["files"])
    return measure_rates(system, params, ray.data.read_parquet(str(folder)).map_batches(scale, batch_format="pyarrow"))


def scale(table: Any) -> Any:
    """Add one to the labels."""
    import pyarrow.compute as pc

    place = table.column_names.index("y")
    return table.set_column(place, "y", pc.add(table.column("y"), 1))


INGEST_TRANSFORMED = Measure(
    name="ingest_transformed",
    title="Through Ray Data",
    systems=("ray_train", "raysgd"),
    quick_systems=("raysgd",),
    units={"rows_per_s": "/s"},
    repeat=3,
    params=_params_of_ingest_transformed,
    run=run_ingest_transformed,
)


def _params_of_ingest_images(system: str, quick: bool) -> dict[str, Any]:
    return {"rows": 256 if quick else 4_096, "files": 8, "epochs": 2 if quick else 4, "batch": 64, "decodes": True}


def run_ingest_images(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Read JPEG images of 224 x 224 from Parquet files; two workers decode them with PIL, in batches of 64."""
    folder = write_images(system.folder / "images", params["rows"], params["files"])
    if system.name == "raysgd":
        return measure_rates(system, params, folder)
    import ray.data

    quiet_ray_data()
    return measure_rates(system, params, ray.data.read_parquet(str(folder)))


INGEST_IMAGES = Measure(
    name="ingest_images",
    title="Images decoded in the worker",
    systems=("ray_train", "raysgd"),
    quick_systems=("raysgd",),
    units={"rows_per_s": "/s"},
    repeat=3,
    params=_params_of_ingest_images,
    run=run_ingest_images,
)


#: The rows of a file in the plan; the files on the disk are small.
_ROWS_PLANNED = 65_536


def _params_of_ingest_planning(system: str, quick: bool) -> dict[str, Any]:
    return {"files": 100 if quick else 10_000, "workers": 10 if quick else 1_000, "batches": 100 if quick else 5_000}


def run_ingest_planning(system: System, params: dict[str, Any]) -> dict[str, list[float]]:
    """Plan an epoch of 10,000 Parquet files for 1,000 workers: read their metadata, make the plans, take batches.

    No worker is started. This process does what the driver does once, and then what each worker does at the beginning of an
    epoch, for one simulated worker after the other. Plain pyarrow counts the rows of the same files.
    """
    folder = _write_files(system.folder / "files", params["files"])
    if system.name == "pyarrow":
        import pyarrow.dataset as ds

        start = time.perf_counter()
        assert ds.dataset(folder).count_rows() == params["files"]
        return {"look_s": [time.perf_counter() - start]}
    from raysgd.data.sources.files import source_of_paths

    start = time.perf_counter()
    source = source_of_paths("rows", folder)
    looked = time.perf_counter() - start
    block_rows = (_ROWS_PLANNED,) * len(source.blocks)
    start = time.perf_counter()
    _plan(block_rows, params["workers"])
    planned = time.perf_counter() - start
    tracemalloc.start()
    source_of_paths("rows", folder)
    _plan(block_rows, params["workers"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "look_s": [looked],
        "plan_s": [planned],
        "plan_mb": [peak / 1e6],
        "batch_s": [_cost_of_batch(block_rows, params["batches"])],
    }


def _write_files(folder: Path, count: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(count):
        pq.write_table(pa.table({"x": [number]}), folder / f"{number:05}.parquet")
    return folder


def _plan(block_rows: tuple[int, ...], workers: int) -> None:
    """Do what each worker does before its first batch: make the order, the sequence of its blocks, and its first rows."""
    from raysgd.data.order.epoch_order import EpochOrder
    from raysgd.data.order.rank_assignment import RankAssignment

    for rank in range(workers):
        order = EpochOrder(block_rows, seed=0, epoch=1, shuffle="window", lanes=workers)
        assignment = RankAssignment(
            num_rows=order.num_rows, global_batch=BATCH * workers, rank=rank, world_size=workers
        )
        order.spans(block_rows, assignment.lanes_of_rank(order.lanes))
        next(assignment.steps(order, 0))


def _cost_of_batch(block_rows: tuple[int, ...], batches: int) -> float:
    """Return the seconds in which one of two workers finds the rows of a batch."""
    from raysgd.data.order.epoch_order import EpochOrder
    from raysgd.data.order.rank_assignment import RankAssignment

    order = EpochOrder(block_rows, seed=0, epoch=1, shuffle="window", lanes=2)
    assignment = RankAssignment(num_rows=order.num_rows, global_batch=2 * BATCH, rank=0, world_size=2)
    steps = assignment.steps(order, 0)
    start, done = time.perf_counter(), 0
    while done < batches:
        done += len(next(steps))
    return (time.perf_counter() - start) / done


INGEST_PLANNING = Measure(
    name="ingest_planning",
    title="Planning",
    systems=("pyarrow", "raysgd"),
    units={"look_s": "s", "plan_s": "s", "plan_mb": "MB", "batch_s": "s"},
    repeat=3,
    params=_params_of_ingest_planning,
    run=run_ingest_planning,
)
