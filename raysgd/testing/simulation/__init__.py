"""A run without processes, cluster or waiting: the TrainerActor's state machine with a fake clock and fake workers.

For those who change policies, or want to know what follows from what, in hundreds of runs a second. `SimulatedRun` is one run
stepped by hand; what its workers say is made by `reports`, `saved`, `part`, `failed` and `broken`. `history_of` gives the
history that its files would have, for the same checks as a real one's, and `past_of_run` what another TrainerActor would
find of it. A `SimulatedRank` keeps what a worker has said until it is delivered, so that a test chooses the order in which
things arrive; raysgd's own rule-based test of all of this is ``tests/unit/test_controller_fuzz.py``.
"""

from raysgd.testing.simulation.histories import history_of
from raysgd.testing.simulation.ranks import GONE, SimulatedAttempt, SimulatedRank
from raysgd.testing.simulation.restarts import past_of_run
from raysgd.testing.simulation.said import RETURNED, broken, failed, part, reports, saved
from raysgd.testing.simulation.stepping import SimulatedRun, finish, kill, running, uri_of

__all__ = [
    "GONE",
    "RETURNED",
    "SimulatedAttempt",
    "SimulatedRank",
    "SimulatedRun",
    "broken",
    "failed",
    "finish",
    "history_of",
    "kill",
    "part",
    "past_of_run",
    "reports",
    "running",
    "saved",
    "uri_of",
]
