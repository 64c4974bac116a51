"""Cross-validation: which rows of a dataset are for training and which for validation. Driver side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysgd.config.checks import check_count
from raysgd.data.dataset import DataContext, WorkerDataset
from raysgd.data.lazy import fetched
from raysgd.data.mixing import permutation
from raysgd.data.names import check_columns
from raysgd.data.parts import Part, Whole, is_chosen
from raysgd.data.plan import LONE
from raysgd.data.source import resolve_datasets
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
) -> tuple[tuple[Part, Part], ...]:
    """Pairs of (train, validation) for k-fold cross-validation, as ``run(dataset=...)`` takes them. No row is copied.

    Each row is in the validation part of exactly one pair, and in the training part of all others. Give a pair's parts to
    a run each, ``dataset={"train": train, "validation": validation}``, or the whole tuple to one run, in which
    ``get_datasets()`` gives it back as datasets. The rows are stored once for all of these, as long as a part is referred
    to.

    Args:
        dataset: Whatever ``run(dataset=...)`` takes as one dataset, but a lazy `ray.data.Dataset`.
        splits: How many pairs, from 2.
        seed: Chooses which rows are together.
        stratify: A column, or a value for each row: each fold has about the same share of each value. By scikit-learn's
            `StratifiedKFold`.
        group: A column, or a value for each row: rows of one value are in one fold. By scikit-learn's `GroupKFold`, with
            ``stratify`` by its `StratifiedGroupKFold`.

    Raises:
        ConfigError: It is nothing that can be a dataset, has fewer rows or groups than ``splits``, or has no such column.
    """
    check_count("splits", splits, minimum=2)
    if splits > _MAX_SPLITS:
        raise ConfigError(f"splits={splits}; give at most {_MAX_SPLITS}.")
    plan = resolve_datasets(dataset, lambda block: block)
    if list(plan.sources) != [LONE]:
        raise ConfigError("to_cv(dataset) takes one dataset, and was given several; call it for each.")
    whole = DataContext(plan, 0, 1, 0, fetch=fetched).get()
    if whole.num_rows is None:
        raise ConfigError(
            "to_cv(dataset) was given a lazy ray.data.Dataset, of which nobody knows which rows it has before it is executed; "
            "give ds.materialize()."
        )
    if whole.num_rows < splits:
        raise ConfigError(f"to_cv(splits={splits}): the dataset has {whole.num_rows} rows, fewer than that.")
    by = {name: _values(whole, name, value) for name, value in (("stratify", stratify), ("group", group))}
    if by["stratify"] is None and by["group"] is None:
        folds = _plain(whole.num_rows, splits, seed)
    else:
        folds = _by_values(whole.num_rows, splits, seed, by["stratify"], by["group"])
    whole.close()
    shared = Whole(dataset, folds)
    return tuple((_part(shared, fold, True), _part(shared, fold, False)) for fold in range(splits))


def _part(whole: Whole, fold: int, is_rest: bool) -> Part:
    return Part(whole, fold, is_rest, int(is_chosen(whole.folds, fold, is_rest).sum()))


def _plain(num_rows: int, splits: int, seed: int) -> NDArray[np.uint16]:
    places = permutation(num_rows, "folds", int(seed))(np.arange(num_rows))
    return (places % splits).astype(np.uint16)


def _by_values(num_rows: int, splits: int, seed: int, stratify: Any, group: Any) -> NDArray[np.uint16]:
    try:
        from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold
    except ImportError as error:
        raise ConfigError("to_cv(stratify=..., group=...) uses scikit-learn: pip install scikit-learn") from error
    makers = {(True, False): StratifiedKFold, (False, True): GroupKFold, (True, True): StratifiedGroupKFold}
    splitter = makers[stratify is not None, group is not None](splits, shuffle=True, random_state=seed)
    folds = np.zeros(num_rows, np.uint16)
    try:
        for fold, (_, validation) in enumerate(splitter.split(np.zeros(num_rows), stratify, group)):
            folds[validation] = fold
    except ValueError as error:
        raise ConfigError(f"to_cv(splits={splits}): {error}") from error
    return folds


def _values(whole: WorkerDataset, argument: str, given: Any) -> NDArray[Any] | None:
    """A value for each row."""
    if given is None:
        return None
    if isinstance(given, str):
        if whole.schema is None:
            raise ConfigError(
                f"to_cv({argument}={given!r}): the dataset is a map-style dataset, whose rows have no columns; give a value for "
                "each row."
            )
        check_columns(whole.name, [given], whole.schema.names, argument)
        batches = whole.get_split().iter_batches(_ROWS_AT_A_TIME, columns=[given])
        values = np.concatenate([batch[given] for batch in batches])
    else:
        values = np.asarray(given)
    if values.shape != (whole.num_rows,):
        raise ConfigError(
            f"to_cv({argument}=...) has values of shape {values.shape}; give one for each of {whole.num_rows} rows."
        )
    return values
