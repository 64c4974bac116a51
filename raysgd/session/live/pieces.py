"""Which ranks hold the same piece of a state, so that each can take the place of another. Worker side.

A piece is recognised by what a rank holds after its first step: names and shapes, where its shards lie, and some values. So
it does not matter which library has distributed the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

#: Values of each tensor that are compared.
_NUM_SAMPLES = 16


def describe_piece(named: Iterable[tuple[str, Any]]) -> bytes:
    """Return a digest that is equal on ranks that hold the same.

    Args:
        named: The tensors of the state by their names. Values of others count as they are.
    """
    import torch

    from raysgd.checkpoint.codecs.torch import is_dtensor, local_shards

    digest, samples = hashlib.blake2b(digest_size=16), []
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name}: {type(value).__name__}\n".encode())
            continue
        places = [str(index) for index in local_shards(value)] if is_dtensor(value) else []
        digest.update(f"{name}: {value.dtype} {tuple(value.shape)} {places}\n".encode())
        local = getattr(value.detach(), "_local_tensor", value.detach()).reshape(-1)
        if local.numel():
            samples.append(local[:: -(-local.numel() // _NUM_SAMPLES)].contiguous().view(torch.uint8))
    for device in {sample.device for sample in samples}:  # one copy from each device
        digest.update(torch.cat([each for each in samples if each.device == device]).cpu().numpy().tobytes())
    return digest.digest()


def number_pieces(digests: Sequence[bytes]) -> tuple[int, ...]:
    """Return for each rank the first one that holds the same piece; empty if all hold the same."""
    first: dict[bytes, int] = {}
    numbers = tuple(first.setdefault(each, rank) for rank, each in enumerate(digests))
    return numbers if any(numbers) else ()


def are_replicated(pieces: Sequence[int]) -> bool:
    """Return whether more than one rank holds each piece. Empty: each rank holds all."""
    return all(pieces.count(piece) > 1 for piece in set(pieces))
