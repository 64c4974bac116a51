"""For those who test what they build on raysgd, and for raysgd's own tests. Nothing else of raysgd imports this package.

- `FaultPlan` breaks a run in ways that are told beforehand; the faults are `Kill`, `Stop`, `Preempt`, `Exit`, `Raise`,
  `Hang`, `OutOfMemory`, `Slow`, `NetworkCut`, `StorageFault`, `DiskFull`, `TornWrite`, `BitFlip`, `KillTrainerActor`,
  `KillDriver`, `RemoveNode`.
- `check_history` tells whether the files of a run keep raysgd's promises, `check_cluster` whether anything was left behind.
- `raysgd.testing.simulation` is the TrainerActor's state machine with a fake clock and fake workers.
- `raysgd.testing.callback_suite` is the suite that callbacks must pass, `raysgd.testing.backend_suite` that of backends. They
  need pytest where they are used.
"""

from raysgd.testing.cluster import ClusterState, LeakError, check_cluster
from raysgd.testing.fault import Fault
from raysgd.testing.faults import (
    BitFlip,
    DiskFull,
    Exit,
    Hang,
    Kill,
    KillDriver,
    KillTrainerActor,
    NetworkCut,
    OutOfMemory,
    Preempt,
    Raise,
    RemoveNode,
    Slow,
    Stop,
    StorageFault,
    TornWrite,
)
from raysgd.testing.history import HistoryError, check_history
from raysgd.testing.plan import FaultPlan, Fired

__all__ = [
    "BitFlip",
    "ClusterState",
    "DiskFull",
    "Exit",
    "Fault",
    "FaultPlan",
    "Fired",
    "Hang",
    "HistoryError",
    "Kill",
    "KillDriver",
    "KillTrainerActor",
    "LeakError",
    "NetworkCut",
    "OutOfMemory",
    "Preempt",
    "Raise",
    "RemoveNode",
    "Slow",
    "Stop",
    "StorageFault",
    "TornWrite",
    "check_cluster",
    "check_history",
]
