"""Slices that XLA lets a kernel read and write in place.

Where an operand of a custom call is a contiguous slice, or a result goes into one, XLA passes the slice's own address
instead of copying it (its dynamic-slice fusion), whatever that address is. Kernels need aligned ones: Triton's are
compiled for multiples of 16 bytes, Mosaic GPU takes multiples of 256.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

ALIGNMENT = 256
"""Bytes; XLA allocates every array at a multiple of them."""
_CHEAP = 2**16  # bytes, copied in the time of a launch

Tree = TypeVar("Tree")


def aligned(arrays: Tree) -> Tree:
    """The arrays of a tree, behind a barrier where a slice in their place may not be aligned: XLA copies it then.

    Numbers of int32 (lengths, tables, ids) may be a part of anything. Other slices of stacked arrays are aligned if
    their size is, and large ones of these are left in their place. So is a large part of a flat array; where its first
    element is at no multiple of ALIGNMENT bytes, the kernel ends in an error.
    """

    def apart(x):
        return lax.optimization_barrier(x) if isinstance(x, Array) and _may_be_misaligned(x) else x

    return jax.tree.map(apart, arrays)


def _may_be_misaligned(x: Array) -> bool:
    size = math.prod(x.shape) * x.dtype.itemsize
    return x.dtype == jnp.int32 or size % ALIGNMENT != 0 or size <= _CHEAP
