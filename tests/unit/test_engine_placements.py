"""The boxes that a rank holds of a sharded tensor, computed without processes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysgd.engine.tensor_parallel.placements import boxes_of


def rebuilt(
    full: torch.Tensor, mesh_shape: tuple[int, int], coordinate: tuple[int, int], placements: list[Placement]
) -> torch.Tensor:
    boxes = boxes_of(full.shape, mesh_shape, coordinate, placements)
    shape = [max((place[dim].stop for _, place in boxes), default=0) for dim in range(full.ndim)]
    local = torch.full(shape, -1)
    for box, place in boxes:
        local[place] = full[box]
    return local


@given(
    parts=st.integers(1, 3),
    width=st.integers(1, 3),
    rows=st.integers(1, 7),
    dp=st.integers(1, 3),
    tp=st.integers(2, 3),
    is_same_dim=st.booleans(),
)
def test_boxes_are_what_tensor_parallelism_and_then_fsdp_cut(
    parts: int, width: int, rows: int, dp: int, tp: int, is_same_dim: bool
) -> None:
    fused = torch.arange(parts * tp * width * rows).reshape(parts * tp * width, rows)
    of_tp: Placement = _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    of_dp: Placement = _StridedShard(0, split_factor=tp) if is_same_dim else Shard(1)
    for dp_rank in range(dp):
        for tp_rank in range(tp):
            own = torch.cat([part.chunk(tp)[tp_rank] for part in fused.chunk(parts)])
            shards = own.chunk(dp, 0 if is_same_dim else 1)
            found = rebuilt(fused, (dp, tp), (dp_rank, tp_rank), [of_dp, of_tp])
            expected = shards[dp_rank] if dp_rank < len(shards) else own[:0]
            assert found.numel() == expected.numel() == 0 or torch.equal(found, expected)


def test_replicated_tensor_is_one_box() -> None:
    whole = (slice(0, 3), slice(0, 4))
    assert boxes_of((3, 4), (2,), (1,), [Replicate()]) == [(whole, whole)]
