"""Constructors of a `MaskInfo`: from segment ids, a mask, cumulative lengths, or tokens without padding."""

from dataclasses import replace
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp

from .segment_masks import PADDING, as_bool, padding_ids

Axes: TypeAlias = str | tuple[str, ...] | None

AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")


class Constructors:
    """The class methods that construct a `MaskInfo`."""

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: Any,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        batch_axis_name: Axes = ("dp", "fsdp"),
        qheads_axis_name: Axes = "tp",
        kvheads_axis_name: Axes = "tp",
        sequence_axis_name: Axes = "sp",
        is_attn_mask: bool = False,
    ) -> Self:
        """From ids [B, Q] and [B, K] (by default those of queries): equal ids are visible, negative ids are padding.

        With `is_attn_mask` the arrays are 1 for tokens and 0 for padding.
        """
        q = jnp.asarray(q_segment_ids)
        kv = q if kv_segment_ids is None else jnp.asarray(kv_segment_ids)
        if is_attn_mask:
            q, kv = (jnp.where(as_bool(x), 0, PADDING) for x in (q, kv))
        axes = dict(zip(AXES, (batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name), strict=True))
        q, kv = q.astype(jnp.int32), kv.astype(jnp.int32)
        return cls(_q_segment_ids=q, _kv_segment_ids=kv, q_positions=q_positions, kv_positions=kv_positions, **axes)

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: Any,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        mask_is_valid: bool = True,
        **axes: Axes,
    ) -> Self:
        """From a mask of tokens [B, S], 0 for padding, or a mask of pairs, [B, Q, K] or [B, H, Q, K].

        With `mask_is_valid=False` the mask is True for hidden entries. With masks of pairs the ids are −1 for queries
        and keys without a visible pair, and 0 for the others.
        """
        mask = as_bool(attention_mask)
        mask = mask if mask_is_valid else ~mask
        positions = dict(q_positions=q_positions, kv_positions=kv_positions)
        if mask.ndim == 2:
            return cls.from_segments(mask, is_attn_mask=True, **positions, **axes)
        if mask.ndim not in (3, 4):
            raise ValueError(
                f"MaskInfo: attention_mask has {mask.ndim} axes; it must have 2 (batch, tokens), 3 (batch, q, k) or 4"
            )
        mask = mask[:, None] if mask.ndim == 3 else mask
        q, kv = padding_ids(mask)
        return cls(_attention_mask=mask, _q_segment_ids=q, _kv_segment_ids=kv, **positions, **axes)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Any,
        *,
        max_q_len: int,
        cu_seqlens_kv: Any = None,
        max_kv_len: int | None = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        **axes: Axes,
    ) -> Self:
        """From the first token of each batch element and the one after its last, [start_0, end_0, start_1, …]."""
        q = jnp.asarray(cu_seqlens_q)
        kv = q if cu_seqlens_kv is None else jnp.asarray(cu_seqlens_kv)
        for name, ends in (("cu_seqlens_q", q), ("cu_seqlens_kv", kv)):
            if ends.size % 2:
                raise ValueError(f"MaskInfo: {name} has {ends.size} entries; there must be a start and an end of each")

        def valid(ends, length):
            start, end = ends.reshape(-1, 2, 1).swapaxes(0, 1)
            return (start <= jnp.arange(length)) & (jnp.arange(length) < end)

        masks = valid(q, max_q_len), valid(kv, max_q_len if max_kv_len is None else max_kv_len)
        found = cls.from_segments(*masks, q_positions, kv_positions, is_attn_mask=True, **axes)
        return replace(found, _cu_seqlens_q=q, _cu_seqlens_kv=kv)

    @classmethod
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: Any = None,
        kv_positions: Any = None,
        **axes: Axes,
    ) -> Self:
        """From a random mask [B, 1, Q, K] that hides the fraction `sparsity` of the pairs."""
        shape = (batch_size, 1, q_len, q_len if kv_len is None else kv_len)
        mask = jax.random.uniform(jax.random.key(seed), shape) >= sparsity
        return cls(_attention_mask=mask, q_positions=q_positions, kv_positions=kv_positions, **axes)

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: Self | None = None,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
    ) -> Self:
        """`mask_info` if it is given; else one from the mask if that is given; else one of tokens without padding."""
        if mask_info is not None:
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None:
            raise ValueError("MaskInfo: dynamic_init is given no mask_info, attention_mask, input_ids or inputs_embeds")
        return cls.from_segments(jnp.zeros(tokens.shape[:2], jnp.int32))
