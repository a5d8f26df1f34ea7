"""The values of rows that derivatives of flash_attention need: lse, its rounding error, and delta."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs

from . import _attention as attention
from . import _tiles as tiles
from ._attention import Folded, dropped, fold_heads, fold_rows, over_features, over_row
from ._logits import logits_of
from ._softmax import Softmax, at_least_lowest, excess_and_mean, merged, of_nothing, of_rows, relative_to_lse


class Rows(NamedTuple):
    """lse, excess and delta of each row, where excess = log(Σ_j exp(s_j − lse) + Σ_n exp(σ_n − lse)).

    The excess is the rounding error of lse: an lse of 60 in float32 is rounded by up to 2e-6, and all weights of its
    row would be wrong by as much.

    p = exp(s − lse − excess) does not depend on lse, since excess compensates any change of it. So lse is a constant
    where this is differentiated, and the derivative of a row's sum comes from excess. The other way round, a second
    derivative would be the sum of two numbers that nearly cancel, one from s and one through lse, each rounded to the
    dtype of q and k: for logits of 36 in bfloat16 it would be off by 8 % rather than by 1 %.

    Rows of a split have no excess, as the sum over all splits is not known: they are differentiated through lse.
    """

    lse: Array
    excess: Array | None = None
    delta: Array | None = None
    do: Array | None = None
    dlse: Array | None = None


def rows_of_backward(
    outputs: Outputs, cotangents: Outputs, x: Folded, spec: FlashAttentionSpec, grid: tiles.Grid
) -> Rows:
    """The `Rows` of the backward, summed in the same loop over tiles as in the forward; of a split, from o and lse."""
    o, lse = fold_outputs(outputs, x, grid)
    sees = lax.gt(lse, np.array(-np.inf, lse.dtype))
    do, dlse = (attention.zero_where_masked(sees, a) for a in fold_outputs(cotangents, x, grid))
    do, lse = of_rows(x, x.q.dtype, x.v.shape[-1]) if do is None else do, at_least_lowest(lse)
    if spec.split:
        delta = over_row(lax.reduce_sum, lax.mul(*(lax.convert_element_type(a, lse.dtype) for a in (do, o))))
        return Rows(lse, None, delta if dlse is None else lax.sub(delta, dlse), do)
    lse = lax.stop_gradient(lse)

    def sums(x, rows):
        x, _, _, s, living, _ = logits_of(x, spec)
        m, p = relative_to_lse(s, rows.lse)
        dp = over_features(attention.zero_where_masked(living.rows, rows.do), x.v)
        return Softmax(m, over_row(lax.reduce_sum, p), over_row(lax.reduce_sum, lax.mul(dropped(p, x, spec), dp)))

    totals = grid.sweep(sums, (x, Rows(lse, do=do)), merged, partial(of_nothing, x, lse.dtype, 1))
    excess, delta = excess_and_mean(totals, x, lse)
    return Rows(lse, excess, delta if dlse is None else lax.sub(delta, dlse), do)


def fold_outputs(outputs: Outputs, x: Folded, grid: tiles.Grid) -> Outputs:
    """o [b,g,r,s,e] and lse [b,g,r,s,1], padded."""
    groups = x.q.shape[1]
    o = None if outputs.o is None else fold_rows(outputs.o, groups)
    lse = None if outputs.lse is None else lax.expand_dims(fold_heads(outputs.lse, groups), (4,))
    return tiles.pad(Outputs(o, lse), grid.padding)
