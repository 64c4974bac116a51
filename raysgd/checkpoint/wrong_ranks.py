"""What is told where a checkpoint in parts does not fit those who load it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from raysgd.errors import ReshardError


def not_for(where: str, ranks: Iterable[int], rank: int, saved_by: int, world_size: int | None) -> ReshardError:
    """The error of a rank that has no part.

    Args:
        where: The checkpoint.
        ranks: Of which it has parts.
        rank: Who loads.
        saved_by: Number of ranks that saved it.
        world_size: Number of ranks that load; None: one process that asked for this rank's.
    """
    if world_size in (None, saved_by):
        return ReshardError(f"{where} has no part of rank {rank}; it has those of ranks {sorted(ranks)}.")
    return ReshardError(
        f"{where} was saved with all_ranks=True by {saved_by} ranks and cannot be split over {world_size}; "
        f"run with num_workers={saved_by}, or save the whole state from rank 0."
    )
