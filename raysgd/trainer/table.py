"""The table that `Trainer` prints: the resources of each worker, and their total out of the cluster's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raysgd._util.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table


def resource_table(bundle: Mapping[str, float], nodes: Sequence[str], cluster: Mapping[str, float] | None) -> Table:
    """Make a table with a row for each worker, and a row of totals.

    Args:
        bundle: The resources of one worker.
        nodes: The node of each worker; ``"-"`` for a worker that is not placed yet.
        cluster: The resources of the cluster; None: this process is not connected to Ray.
    """
    names = ["CPU", "GPU", *sorted(set(bundle) - {"CPU", "GPU"})]
    rows = [[index, node, *(f"{bundle.get(name, 0):g}" for name in names)] for index, node in enumerate(nodes)]
    totals = [f"{len(nodes) * bundle.get(name, 0):g}" for name in names]
    if cluster is not None:
        totals = [f"{total} of {cluster.get(name, 0):g}" for total, name in zip(totals, names, strict=True)]
    where = "" if cluster is None else "of the cluster"
    return make_table(["worker", "node", *names], rows, right=names, totals=["total", where, *totals])
