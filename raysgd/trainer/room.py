"""The placement group that a Trainer is made in, such as that of a Tune trial: its workers take their room there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray._private.worker import global_worker  # no public API tells what of a bundle this process has
from ray.util import get_current_placement_group

from raysgd.config import ScalingConfig
from raysgd.errors import InfeasibleError
from raysgd.workers.placement import describe_bundle, explain_full, seat_bundle, seats_in
from raysgd.workers.seats import Room

#: How Ray names what a process has of a bundle.
_OF_BUNDLE = re.compile(r"(?P<name>.+)_group_(?P<index>\d+)_[0-9a-f]+")


def find_room(scaling: ScalingConfig, num_spares: int) -> Room | None:
    """The seats in this process's placement group; None where it is in none whose resources its children get.

    Raises:
        InfeasibleError: The group is too small; with the arithmetic.
    """
    placement = get_current_placement_group()
    if placement is None:
        return None
    taken = _taken(global_worker.core_worker.resource_ids())  # type: ignore[attr-defined]
    free = [_less(bundle, taken.get(index, {})) for index, bundle in enumerate(placement.bundle_specs)]
    why = explain_full(scaling, free, num_spares)
    if why is not None:
        bundle, count = describe_bundle(seat_bundle(scaling)), scaling.min_workers + num_spares
        raise InfeasibleError(
            f"the Trainer is made in a placement group, which its workers must fit into: it {why}. Give the group {count} "
            f"bundles of {bundle} beside what this process has; for a Tune function: tune.with_resources(function, "
            f"raysgd.tune_integration.trial_resources(num_workers={scaling.num_workers}))."
        )
    return Room(placement, tuple(seats_in(free, seat_bundle(scaling))))


def _taken(resource_ids: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """What this process has of each bundle."""
    taken: dict[int, dict[str, float]] = {}
    for key, parts in resource_ids.items():
        if (found := _OF_BUNDLE.fullmatch(key)) is not None:
            amount = sum(share for _, share in parts)
            taken.setdefault(int(found["index"]), {})[found["name"]] = amount
    return taken


def _less(bundle: Mapping[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in bundle.items()}
