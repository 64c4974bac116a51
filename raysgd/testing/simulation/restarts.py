"""A simulated run whose controller's process dies, and another goes on from what the first one left."""

from __future__ import annotations

from collections.abc import Iterable

from raysgd.checkpoint.manifest import Manifest
from raysgd.controller import frames
from raysgd.controller.past import Past, past_of
from raysgd.testing.simulation.histories import history_of
from raysgd.testing.simulation.stepping import SimulatedRun


def past_of_run(run: SimulatedRun, on_storage: Iterable[Manifest] | None = None) -> Past:
    """What its files say; the checkpoints, if none are given, are those it knows to be committed."""
    history = history_of(run)
    told = [frame for frame in history.frames if frame.kind != frames.REPORTS]
    known = [stored.manifest for stored in history.stored.values() if stored.manifest is not None]
    manifests = sorted(known if on_storage is None else on_storage, key=lambda manifest: manifest.number)
    return past_of(told, history.frames[-1].seq, manifests, max((m.number for m in manifests), default=0))
