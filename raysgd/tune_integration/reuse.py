"""Says when trials could take over the processes of earlier ones. Runs in the processes of trials.

Whether a search reuses processes is a setting of Tune that a trainable cannot see. It can see that a trial's process ends before
the search, and that the next trial starts a new one.
"""

from __future__ import annotations

from ray.experimental import internal_kv

from raysgd._util.logs import get_logger
from raysgd.workers.placement.cluster import NAMESPACE

_ENDED, _ADVISED = b"ended", b"advised"


def note_end(search: str) -> None:
    """Note that the process of a finished trial ends."""
    internal_kv._internal_kv_put(_key(search), _ENDED, overwrite=False, namespace=NAMESPACE)


def advise(search: str) -> None:
    """Log, once in a search, that this trial could have had the processes of an earlier one. Called in new processes."""
    if internal_kv._internal_kv_get(_key(search), namespace=NAMESPACE) == _ENDED:
        internal_kv._internal_kv_put(_key(search), _ADVISED, namespace=NAMESPACE)
        get_logger().info(
            "this trial starts new processes, although those of an earlier trial have ended. With reuse_actors=True it would "
            "have taken these over, which saves some seconds of each trial: tune.TuneConfig(reuse_actors=True), or "
            "raysgd.tune_integration.search."
        )


def _key(search: str) -> str:
    return f"search/{search}"
