"""Says what a search waits for while its first trial has no resources. Runs in the process of the search.

Ray Tune reserves the resources of a trial before it starts the trial's process, so that process cannot say it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util import placement_group_table

from raysgd._util.logs import get_logger
from raysgd.controller.holders import RESERVED, explain_missing
from raysgd.controller.requests import TrainerSpec
from raysgd.workers.group.group import WAIT_REPORT_S
from raysgd.workers.placement.capacity import slot_bundle

#: The searches of this process that were watched.
_watched: set[str] = set()


def watch_first_trial(search: str, spec: TrainerSpec) -> None:
    """Log what a search waits for, if none of its trials has its resources after two seconds; returns at once.

    Args:
        search: Identifies the search; it is watched once.
        spec: The settings of a trial's Trainer.
    """
    if search not in _watched:
        _watched.add(search)
        threading.Thread(target=_watch, args=(spec,), name="raysgd-search", daemon=True).start()


def _watch(spec: TrainerSpec) -> None:
    time.sleep(WAIT_REPORT_S)
    bundle, count = slot_bundle(spec.scaling), spec.scaling.min_workers + spec.failure_config.num_spares
    with contextlib.suppress(Exception):  # the search may be over, and its cluster gone
        if _has_placement([bundle] * count, placement_group_table().values()):
            return
        if (why := explain_missing("", spec.scaling, count)) is not None:
            get_logger().warning("the search cannot start a trial yet, it is %s", why)


def _has_placement(bundles: Sequence[Mapping[str, float]], groups: Any) -> bool:
    """Return whether a placement group of these bundles has its resources: that of a trial. Tune gives it no name."""
    return any(
        group["state"] in RESERVED and not group["name"] and list(group["bundles"].values()) == list(bundles)
        for group in groups
    )
