"""Random keys for a part of a batch: each row gets the numbers that it has when the batch is computed at once. Worker side.

A batch is computed in parts to save memory, or by an elastic group that has become smaller. A key of `key_of_rows` knows which
rows its part has. What is drawn with it depends on the shape:

- first dimension is the rows of the part: the numbers of these rows among those of the whole batch;
- another dimension is a multiple of the rows, so it may hold them: numbers of the part's own;
- otherwise, such as noise for parameters: the same numbers in every part.

The key of a whole batch draws what `jax.random.PRNGKey` draws.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry2x32_p, threefry_prng_impl

#: In place of the first row, in keys of single rows.
_NO_ROWS = np.uint32(2**32 - 1)
_MAX_DRAWN = 2**32


def key_of_rows(key: Any, first: Any, stride: int, num_rows: int, num_all: int) -> Any:
    """Return a key for a part of a batch.

    Args:
        key: The key of the batch, as `jax.random.PRNGKey` makes it.
        first: The number of the part's first row in the batch.
        stride: The difference between the numbers of its rows.
        num_rows: How many rows it has.
        num_all: How many rows the batch has.
    """
    has_places = key.shape == (2,) and jax.config.values["jax_threefry_partitionable"]
    if not has_places:  # another generator, whose numbers do not depend on their place alone
        return jnp.where(first == 0, key, jax.random.fold_in(key, first))
    data = jnp.append(key, jnp.asarray(first, jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_generator(stride, num_rows, num_all))


@functools.cache
def _generator(stride: int, num_rows: int, num_all: int) -> Any:
    name = f"raysgd_rows_{stride}_{num_rows}_{num_all}"
    rows = _Rows(stride, num_rows, num_all)
    return define_prng_impl(
        key_shape=(3,),
        seed=rows.seed,
        split=rows.split,
        random_bits=rows.random_bits,
        fold_in=rows.fold_in,
        name=name,
        tag=name,
    )


class _Rows:
    """A generator whose keys are a key of threefry and the first row of a part; arguments as for `key_of_rows`."""

    def __init__(self, stride: int, num_rows: int, num_all: int) -> None:
        self._stride = np.uint32(stride)
        self._num_rows = num_rows
        self._num_all = num_all

    def seed(self, number: Any) -> Any:
        return jnp.append(threefry_prng_impl.seed(number), np.uint32(0))

    def fold_in(self, key: Any, data: Any) -> Any:
        return jnp.append(threefry_prng_impl.fold_in(key[:2], data), key[2])

    def split(self, key: Any, shape: tuple[int, ...]) -> Any:
        if self._has_rows(shape) and shape != (2,):  # a key for each row; two keys are more likely for two purposes
            keys, first = jnp.stack(self._hash(key, shape), -1), _NO_ROWS
        else:
            keys, first = threefry_prng_impl.split(key[:2], shape), key[2]
        return jnp.concatenate([keys, jnp.broadcast_to(first, (*shape, 1))], -1)

    def random_bits(self, key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
        if self._has_rows(shape):
            high, low = self._hash(key, shape)
            dtype = jnp.dtype(f"uint{bit_width}")
            if bit_width == 64:
                return high.astype(dtype) << np.uint64(32) | low.astype(dtype)
            return (high ^ low).astype(dtype)
        plain = key[:2]
        if any(size % self._num_rows == 0 for size in shape):
            is_own = (key[2] != 0) & (key[2] != _NO_ROWS)
            plain = jnp.where(is_own, threefry_prng_impl.fold_in(plain, key[2]), plain)
        return threefry_prng_impl.random_bits(plain, bit_width, shape)

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        return shape[:1] == (self._num_rows,) and self._num_all * math.prod(shape[1:]) < _MAX_DRAWN

    def _hash(self, key: Any, shape: tuple[int, ...]) -> Any:
        """Return two words for each element, as threefry makes them from its place in an array of the whole batch."""
        row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
        row = jnp.where(key[2] == _NO_ROWS, row, key[2] + self._stride * row)
        place = row * np.uint32(math.prod(shape[1:]))
        for dim in range(1, len(shape)):
            place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(math.prod(shape[dim + 1 :]))
        return threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(place), place)
