"""A call for one group of heads after the other, where what it makes for all at once would take too much memory."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._xla._tiles import varying_like

# The axis of heads of arrays of attention; others, and those of one head, are shared by all.
AXES = dict(q=2, w_kc=2, w_vc=2, bias=1, mask=1, sinks=1, softmax_scale=1, dropout=1, o=2, lse=1)
Arrays = Mapping[str, Any]


def groups_of(heads: int, bytes_of_all: int, most_bytes: int) -> int:
    """The least number of groups of equally many heads, each of which takes no more than `most_bytes`."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and (bytes_of_all <= n * most_bytes or n == heads))


def in_groups(compute: Callable[..., Arrays], heads: int, groups: int, *given: Arrays) -> dict[str, Array]:
    """compute(*given) for one group of `heads` after the other, of arrays by name; None stands for one that is absent.

    Results that have an axis of heads are written to their place in the whole; others, cotangents of shared arrays, are
    summed.
    """
    if groups == 1:
        return dict(compute(*given))
    has_heads = lambda name, a: name in AXES and a is not None and a.shape[AXES[name]] > 1
    split = {"o", "lse"} | {name for arrays in given for name, a in arrays.items() if has_heads(name, a)}
    size = heads // groups

    def of_group(n):
        part = lambda name, a: lax.dynamic_slice_in_dim(a, n * size, size, AXES[name]) if has_heads(name, a) else a
        return compute(*({name: part(name, a) for name, a in arrays.items()} for arrays in given))

    def step(n, whole):
        for name, a in of_group(n).items():
            if name in split:
                added = lax.dynamic_update_slice_in_dim(whole[name], a, n * size, AXES[name])
            else:
                added = whole[name] + a.astype(whole[name].dtype)
            whole = {**whole, name: added}
        return whole

    def zeros(name, x):
        if name not in split:
            return jnp.zeros(x.shape, np.promote_types(x.dtype, np.float32))
        axis = AXES[name]
        return jnp.zeros((*x.shape[:axis], heads, *x.shape[axis + 1 :]), x.dtype)

    types = jax.eval_shape(of_group, jnp.int32(0))
    return lax.fori_loop(0, groups, step, varying_like(given, {name: zeros(name, x) for name, x in types.items()}))
