"""A random-access permutation: where place ``i`` of n comes from, computed for any ``i`` without holding the other n - 1.

Pure; runs in workers. A cipher on the smallest power of two that holds n: rounds of a keyed multiplication and addition
modulo that power, and a shift that brings high bits down; each is invertible, so their sequence is. Values of n and
above are put through again until they fall below it (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002), so that what remains is a permutation of n. Keys come from BLAKE2, not from a library's random
generator, whose streams may change with its version.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Small domains mix less in a round, and cost little: with 8 rounds all orders of 3 to 6 rows are about equally likely.
_ROUNDS, _ROUNDS_SMALL, _SMALL_BITS = 4, 8, 12


class Permutation:
    """A permutation of ``range(size)``, called with the places that are wanted. Immutable.

    Args:
        size: At least 1.
        key: What chooses the permutation; equal keys give equal ones.
    """

    def __init__(self, size: int, key: tuple[object, ...]) -> None:
        bits = max(2, (size - 1).bit_length())
        word: Any = np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64  # small ones are quicker
        mask = (1 << bits) - 1
        self._size, self._word = size, word
        self._mask, self._shift = word(mask), word((bits + 1) // 2)
        drawn = _draw(key, 2 * (_ROUNDS_SMALL if bits < _SMALL_BITS else _ROUNDS))
        self._rounds = [(word(a & mask | 1), word(b & mask)) for a, b in zip(drawn[::2], drawn[1::2], strict=True)]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = self._mix(places.astype(self._word))
        outside = np.flatnonzero(mixed >= self._size)
        while len(outside):
            again = self._mix(mixed[outside])
            mixed[outside] = again
            outside = outside[again >= self._size]
        return mixed.astype(np.int64)

    def _mix(self, values: NDArray[Any]) -> NDArray[Any]:
        """One pass, in place; arithmetic wraps around, as unsigned integers do."""
        high = np.empty_like(values)
        for factor, summand in self._rounds:
            values *= factor
            values += summand
            values &= self._mask
            np.right_shift(values, self._shift, out=high)
            values ^= high
        return values


@lru_cache(maxsize=64)
def permutation(size: int, *key: object) -> Permutation:
    """`Permutation`, kept: neighbouring batches ask for the same ones."""
    return Permutation(size, key)


def _draw(key: tuple[object, ...], count: int) -> list[int]:
    words: list[int] = []
    text = repr(key).encode()
    for part in range(-(-count // 8)):
        digest = hashlib.blake2b(text, digest_size=64, salt=part.to_bytes(16, "little")).digest()
        words += (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8))
    return words[:count]
