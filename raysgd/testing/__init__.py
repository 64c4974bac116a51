"""Tools for tests of programs and extensions that use raysgd, and for raysgd's own tests. No other package imports them.

- `FaultPlan` makes planned faults happen in a run; the faults are `Kill`, `Stop`, `Preempt`, `Exit`, `Raise`, `Hang`,
  `OutOfMemory`, `Slow`, `NetworkCut`, `StorageFault`, `DiskFull`, `TornWrite`, `BitFlip`, `KillTrainerActor`, `KillDriver`,
  `RemoveNode`.
- `check_history` checks that the files of a run keep raysgd's promises, `check_cluster` that nothing was left behind.
- `raysgd.testing.callback_suite` is the suite that callbacks must pass; `raysgd.testing.backend_suite` and
  `raysgd.testing.backend_nodes_suite` are those for backends, `raysgd.testing.storage_suite` is that for storage. They need
  pytest.
"""

from raysgd.testing.cluster import ClusterState, LeakError, check_cluster
from raysgd.testing.faults import (
    BitFlip,
    DiskFull,
    Exit,
    Fault,
    Hang,
    Kill,
    KillDriver,
    KillProcess,
    KillTrainerActor,
    NetworkCut,
    OutOfMemory,
    Preempt,
    Raise,
    RemoveNode,
    Slow,
    Stop,
    StopProcess,
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
    "KillProcess",
    "KillTrainerActor",
    "LeakError",
    "NetworkCut",
    "OutOfMemory",
    "Preempt",
    "Raise",
    "RemoveNode",
    "Slow",
    "Stop",
    "StopProcess",
    "StorageFault",
    "TornWrite",
    "check_cluster",
    "check_history",
]
