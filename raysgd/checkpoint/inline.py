"""Small states as JSON alone, arrays included: metrics in a manifest, a rank's data position and generator states.

`encode_small` runs in workers; the control plane carries the result without reading it, so that it needs no torch.
"""

from __future__ import annotations

import base64
import math
from typing import Any, TypeAlias

from raysgd.checkpoint.foreign import synchronize
from raysgd.checkpoint.leaves import Leaf, StoredLeaf
from raysgd.checkpoint.tensors import ITEM_BYTES
from raysgd.checkpoint.tree import Decoder, Encoder

Json: TypeAlias = Any


def encode_small(state: Any, *, what: str = "state") -> Json:
    """JSON of a state without files beside it: text, numbers, containers, generator states, small tensors as base64.

    Args:
        state: As for ``save_checkpoint``; nothing in it is pickled.
        what: Its name in errors.

    Raises:
        UnsafeStateError: It has a leaf that only pickle could hold.
    """
    return Encoder(InlineLeaves(), root=what).encode_state(state)


def decode_small(node: Json, *, what: str = "state", where: str = "a manifest") -> Any:
    """The state of `encode_small`; CheckpointCorruptError where the JSON is none of its."""
    return Decoder(InlineLeaves(), where, root=what).decode_state(node)


class InlineLeaves:
    """Leaves within the JSON, a `LeafWriter` and a `LeafSource`. NumPy is loaded only where there are any."""

    def add(self, leaf: Leaf) -> Json:
        import numpy as np

        area = np.empty(leaf.num_bytes, np.uint8)
        leaf.fill(leaf.source, area)
        synchronize([leaf])
        return ["inline", leaf.dtype, list(leaf.shape), base64.b64encode(area.tobytes()).decode()]

    def get(self, reference: Json) -> StoredLeaf:
        import numpy as np

        _, dtype, shape, text = reference
        data = bytearray(base64.b64decode(text, validate=True))  # writable
        if math.prod(shape) * ITEM_BYTES[dtype] != len(data):
            raise ValueError(f"{len(data)} bytes do not fill {shape} of {dtype}")
        return StoredLeaf(dtype, tuple(shape), np.frombuffer(data, np.uint8))
