"""``nn.MultiheadAttention`` whose heads the ranks share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from raysgd.engine.tensor_parallel.layers import _Layer


class ShardedMultiheadAttention(_Layer):
    """Multi-head attention with ``nn.MultiheadAttention``'s arguments, of which each rank computes its heads.

    `out_proj` is a `RowLinear`, so the outputs are whole. The forward pass is written again: torch's own checks that the
    weights have the sizes of all heads.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        query, key, value = self._enter(query, key, value)
        is_batched, batch_dim = query.dim() == 3, 0 if self.batch_first else 1
        rows = [one.unsqueeze(0) if not is_batched else one.movedim(batch_dim, 0) for one in (query, key, value)]
        queries, keys, values = (self._heads(one) for one in self._project(*rows))
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        with self._tp.own_generator() if self.training and self._tp_draws else nullcontext():
            attended, weights = self._attend(
                queries, keys, values, key_padding_mask, attn_mask, need_weights=need_weights, is_causal=is_causal
            )
        joined = attended.transpose(1, 2).flatten(2)
        output = self.out_proj(joined.movedim(0, batch_dim) if is_batched else joined.squeeze(0))
        if weights is not None:
            weights = self._whole(weights, average_attn_weights)
            weights = weights if is_batched else weights.squeeze(0)
        return output, weights

    def _enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bring the inputs into the region; keys that are not the queries come from another stack, which is whole."""
        inside = self._tp.enter(query)
        keys = inside if key is query else self._tp.copy(key)
        values = keys if value is key else inside if value is query else self._tp.copy(value)
        return inside, keys, values

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights = self._tp.local(self.in_proj_weight).chunk(3)
        else:
            weights = [self._tp.local(one) for one in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]
        biases: Any = (None, None, None)
        if self.in_proj_bias is not None:
            biases = self._tp.own_of_fused(self.in_proj_bias, 3).unbind()
        q, k, v = (
            functional.linear(one, weight, bias)
            for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else self._own_mask(key_padding_mask, attn_mask, queries)
        if not need_weights:
            return functional.scaled_dot_product_attention(queries, keys, values, mask, dropout, is_causal), None
        scores = queries @ keys.transpose(-2, -1) * self.head_dim**-0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = functional.dropout(weights, dropout, self.training)
        return weights @ values, weights

    def _own_mask(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, queries: Tensor) -> Tensor | None:
        """Return what is added to this rank's scores, which broadcasts to (batch, heads, queries, keys)."""
        mask: Tensor | None = None
        if attn_mask is not None:
            mask = _added(attn_mask, queries)
            if mask.dim() == 3:  # (batch * heads, queries, keys), with all heads
                own = queries.shape[1]
                mask = mask.view(-1, self.num_heads, *mask.shape[1:]).narrow(1, self._tp.rank * own, own)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, queries)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask

    def _whole(self, weights: Tensor, is_average: bool) -> Tensor:
        if is_average:
            return self._tp.sum(weights.sum(1) / self.num_heads)
        return self._tp.concatenate(weights, 1)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers that are added to scores; a bool mask is True where attention is not allowed."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)
