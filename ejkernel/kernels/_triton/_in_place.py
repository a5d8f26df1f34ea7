"""The launch of Triton kernels that write some of their outputs in the place of given arrays."""

import warnings
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax import Array

from . import _launch


def launch_in_place(
    kernel: Any,
    *operands: Array | None,
    placed: Mapping[str, Array],
    new: Mapping[str, jax.ShapeDtypeStruct],
    zeroed: Container[str] = (),
    **how: Any,
) -> dict[str, Array]:
    """The outputs of a launch by name: `new` ones, zeroed if named, and those in the place of given arrays.

    The parameters of a kernel are the operands, the placed arrays, and the new outputs: a launch gets the buffers of
    its operands, and for further parameters the first of its results. `how` is as for `_launch.launch`.
    """
    first = sum(a is not None for a in operands)
    out_type = (*new.values(), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in placed.values()))
    with warnings.catch_warnings():
        # jax-triton would rather have references of JAX, which no rule of lowering can make.
        warnings.filterwarnings("ignore", ".*_(aliases|outputs) is deprecated", DeprecationWarning)
        found = _launch.launch(
            kernel, *operands, *placed.values(), out_type=out_type,
            input_output_aliases={first + n: len(new) + n for n in range(len(placed))},
            zeroed_outputs=tuple(n for n, name in enumerate(new) if name in zeroed),
            **how,
        )  # fmt: skip
    found = dict(zip((*new, *placed), found, strict=True))
    if not placed:
        return found
    # XLA fuses a call with the update of a slice that its result goes into, as in a scan, and lets it write there
    # rather than in the place of its operand. A barrier, which costs nothing, keeps the two apart.
    return found | jax.lax.optimization_barrier({name: found[name] for name in placed})
