"""A run without processes, cluster or waiting: the TrainerActor's state machine with a fake clock.

It shows how a run reacts to events, in hundreds of runs a second. `SimulatedRun` is one run, stepped by hand. `reports`,
`saved`, `part`, `failed` and `broken` make the events of its workers. `history_of` returns the history that its files would
have, for the same checks as a real run's. `previous_state_of` returns what a restarted TrainerActor would read.
``tests/support/run_fuzz.py`` steps random runs.
"""

from support.simulation.events import RETURNED, broken, failed, part, reports, saved, scoring
from support.simulation.histories import history_of, previous_state_of
from support.simulation.stepping import SimulatedRun, finish, kill, running, uri_of

__all__ = [
    "RETURNED",
    "SimulatedRun",
    "broken",
    "failed",
    "finish",
    "history_of",
    "kill",
    "part",
    "previous_state_of",
    "reports",
    "running",
    "saved",
    "scoring",
    "uri_of",
]
