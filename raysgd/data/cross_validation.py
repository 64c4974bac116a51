"""`to_cv`: splits a dataset into training and validation subsets for cross-validation. Driver side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd._util.logs import get_logger
from raysgd._util.text import in_bytes
from raysgd.config.checks import check_count
from raysgd.data.dataset import WorkerDataset, WorkerDatasets
from raysgd.data.order.epoch_order import permutation
from raysgd.data.plan import UNNAMED, check_columns
from raysgd.data.sources.resolve import is_lazy, resolve_datasets
from raysgd.data.sources.subsets import DatasetSubset, FoldedDataset
from raysgd.data.streams.stream import fetch_object, materialize
from raysgd.errors import ConfigError

_MAX_SPLITS = 65_535
_ROWS_AT_A_TIME = 65_536


def to_cv(
    dataset: Any,
    splits: int = 5,
    seed: int = 0,
    *,
    stratify: str | Sequence[Any] | NDArray[Any] | None = None,
    group: str | Sequence[Any] | NDArray[Any] | None = None,
) -> tuple[tuple[DatasetSubset, DatasetSubset], ...]:
    """Return (train, validation) pairs for k-fold cross-validation, as ``run(dataset=...)`` takes them. Copies no rows.

    Each row is in the validation subset of exactly one pair and in the training subset of all others. Run each pair by
    itself, ``dataset={"train": train, "validation": validation}``, or give the whole tuple to one run, in which
    ``get_datasets()`` returns the pairs as datasets. All these runs store the rows once, as long as a subset is referenced.

    Args:
        dataset: Anything that ``run(dataset=...)`` takes as one dataset. A lazy `ray.data.Dataset` is executed, and its rows
            stay in the object store.
        splits: Number of pairs, at least 2.
        seed: Selects which rows share a fold.
        stratify: A column, or a value for each row: each fold has about the same proportion of each value. Uses
            scikit-learn's `StratifiedKFold`.
        group: A column, or a value for each row: rows of one value stay in one fold. Uses scikit-learn's `GroupKFold`, or
            its `StratifiedGroupKFold` together with ``stratify``.

    Raises:
        ConfigError: The argument is not a dataset, has fewer rows or groups than ``splits``, or has no such column.
    """
    check_count("splits", splits, minimum=2)
    if splits > _MAX_SPLITS:
        raise ConfigError(f"splits={splits} is too large; give at most {_MAX_SPLITS}.")
    if is_lazy(dataset):
        dataset = materialize(dataset)
        get_logger().info(
            "to_cv has executed the lazy ray.data.Dataset, because folds are made of known rows; its %s rows take %s of the "
            "object store",
            f"{dataset.count():,}",
            in_bytes(dataset.size_bytes()),
        )
    plan = resolve_datasets(dataset, lambda block: block)
    if list(plan.sources) != [UNNAMED]:
        raise ConfigError("to_cv(dataset) takes one dataset, but several were given; call it once for each.")
    whole = WorkerDatasets(plan, 0, 1, 0, fetch=fetch_object).get()
    assert whole.num_rows is not None, "the dataset is not lazy"
    if whole.num_rows < splits:
        raise ConfigError(f"to_cv(splits={splits}) needs at least {splits} rows; the dataset has {whole.num_rows}.")
    strata, groups = _values(whole, "stratify", stratify), _values(whole, "group", group)
    if strata is None and groups is None:
        folds = _shuffled_folds(whole.num_rows, splits, seed)
    else:
        folds = _sklearn_folds(whole.num_rows, splits, seed, strata, groups)
    whole.close()
    folded = FoldedDataset(dataset, folds)
    return tuple((folded.subset(fold, is_complement=True), folded.subset(fold)) for fold in range(splits))


def _shuffled_folds(num_rows: int, splits: int, seed: int) -> NDArray[np.uint16]:
    places = permutation(num_rows, "folds", int(seed))(np.arange(num_rows))
    return (places % splits).astype(np.uint16)


def _sklearn_folds(num_rows: int, splits: int, seed: int, strata: Any, groups: Any) -> NDArray[np.uint16]:
    try:
        from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold
    except ImportError as error:
        raise ConfigError("to_cv(stratify=..., group=...) needs scikit-learn: pip install scikit-learn") from error
    makers = {(True, False): StratifiedKFold, (False, True): GroupKFold, (True, True): StratifiedGroupKFold}
    splitter = makers[strata is not None, groups is not None](splits, shuffle=True, random_state=seed)
    folds = np.zeros(num_rows, np.uint16)
    try:
        for fold, (_, validation) in enumerate(splitter.split(np.zeros(num_rows), strata, groups)):
            folds[validation] = fold
    except ValueError as error:
        raise ConfigError(f"to_cv(splits={splits}): {error}") from error
    return folds


def _values(whole: WorkerDataset, argument: str, given: Any) -> NDArray[Any] | None:
    """Return a value for each row."""
    if given is None:
        return None
    if isinstance(given, str):
        if whole.schema is None:
            raise ConfigError(
                f"to_cv({argument}={given!r}) names a column, but the rows of a map-style dataset have no columns; give a "
                "value for each row."
            )
        check_columns(whole.name, [given], whole.schema.names, argument)
        batches = whole.get_split().iter_batches(_ROWS_AT_A_TIME, columns=[given])
        values = np.concatenate([batch[given] for batch in batches])
    else:
        values = np.asarray(given)
    if values.shape != (whole.num_rows,):
        raise ConfigError(
            f"to_cv({argument}=...) has values of shape {values.shape}; give one value for each of the {whole.num_rows} rows."
        )
    return values
