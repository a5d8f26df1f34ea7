"""Packed sequences in ring attention: cu_seqlens of the whole sequence, as segment ids of the tokens of a device."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...errors import value_error
from ...primitives.flash_attention import Operands
from ._arguments import array, int32, require_cuts, require_rank
from ._ring_layout import Band, runs
from .ring_order import check_halves


def unpacked(
    operation: str, given: Operands, axis_name: Any, size: int, layout: str, band: Band, longest: int | None
) -> tuple[Operands, Band]:
    """The call with q, k and v [1, T, heads, features], segment ids for cu_seqlens, and a band.

    With equal cu_seqlens, query i is aligned with key i, in its sequence as in the whole. Others align the last tokens
    of each sequence, which no band of the whole does. `longest` bounds the lengths, and so how far a query sees; where
    the tokens of a device are striped over the whole, that leaves out no hop.
    """
    cuts = dict(cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k)
    if any(x is None for x in cuts.values()):
        raise value_error(operation, "cu_seqlens_q and cu_seqlens_k must be given together")
    if given.q_segment_ids is not None or given.kv_segment_ids is not None:
        raise value_error(
            operation, "segment ids and cu_seqlens both divide the tokens into sequences; give one of them"
        )
    shards = {name: array(operation, name, getattr(given, name)) for name in "qkv"}
    require_rank(operation, 3, "tokens of this device, heads, features, since cu_seqlens are given", **shards)
    aligned = given.cu_seqlens_q is given.cu_seqlens_k and shards["q"].shape[0] == shards["k"].shape[0]
    cuts = {name: array(operation, name, x) for name, x in cuts.items()}
    require_cuts(operation, **cuts)
    if band != (None, None) and not aligned:
        rule = "with causal or a window, q and k must have as many tokens, and cu_seqlens_q be cu_seqlens_k, one array"
        raise value_error(operation, f"sequences are aligned by their last tokens; {rule}", **shards, **cuts)
    if aligned and longest is not None and layout != "striped":
        band = tuple(longest - 1 if bound is None else min(bound, longest - 1) for bound in band)
    q, k = (
        _ids(operation, name, shards[name], int32(x), axis_name, size, layout)
        for name, x in zip("qk", cuts.values(), strict=True)
    )
    shards = {name: x[None] for name, x in shards.items()}
    return given._replace(**shards, q_segment_ids=q, kv_segment_ids=k, cu_seqlens_q=None, cu_seqlens_k=None), band


def _ids(operation: str, name: str, x: Array, cuts: Array, axis_name: Any, size: int, layout: str) -> Array:
    """[1, T], the number of the sequence that each token of the device is in; −1 outside of all."""
    check_halves(operation, name, x.shape[0], size, layout)
    of_devices = [runs(x.shape[0], size, layout, device) for device in range(size)]
    device = lax.axis_index(axis_name)
    firsts = [
        jnp.asarray(np.array([run.first for run in column], np.int32))[device]
        for column in zip(*of_devices, strict=True)
    ]
    steps = [run.step * np.arange(run.count, dtype=np.int32) for run in of_devices[0]]
    tokens = jnp.concatenate([first + step for first, step in zip(firsts, steps, strict=True)])
    number = jnp.searchsorted(cuts, tokens, side="right", method="compare_all").astype(jnp.int32) - 1
    return jnp.where(number < cuts.shape[0] - 1, number, -1)[None]
