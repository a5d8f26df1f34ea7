"""The backward: drhs by the kernel in matrices.py, dlhs as a grouped product with the transposed matrices.

dlhs_i = do_i · rhs_gᵀ        drhs_g = Σ_{i∈g} lhs_iᵀ · do_i
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels._dispatch import select
from ejkernel.kernels._grouped_matmul import outside
from ejkernel.kernels._target import gpu_target
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types.grouped_matmul import GroupedMatmulConfig
from ejkernel.xla_utils.groups import group_bounds

from .matrices import Plan, multiply_groups


def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec,
    config: GroupedMatmulConfig,
) -> tuple[Array, ...]:
    """The cotangents of the operands that `wrt` names, in that order."""
    x, do, found = primals, cotangents.o, {}
    narrow = do.astype(x.lhs.dtype)
    if "lhs" in wrt:
        found["lhs"] = _rows(x, narrow, spec)
    if "rhs" in wrt:
        found["rhs"] = _matrices(x, narrow, spec, config)
    if "existing_out" in wrt:
        found["existing_out"] = outside(do, x)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _rows(x: Operands, do: Array, spec: GroupedMatmulSpec) -> Array:
    """dlhs, by the implementation that the registry picks for that product."""
    product = Operands(do, x.rhs.swapaxes(2, 3), x.group_sizes, x.group_offset)
    spec = replace(spec, preferred_element_type=x.lhs.dtype.name, transpose_rhs=not spec.transpose_rhs)
    forward = select("grouped_matmul", spec, product, gpu_target()).implementation
    return forward(*product, spec=spec, config=forward.heuristic(spec, product, gpu_target())).o


def _matrices(x: Operands, do: Array, spec: GroupedMatmulSpec, config: GroupedMatmulConfig) -> Array:
    """drhs [b, e, k, n], computed in the memory order of rhs: transposed if rhs is."""
    (b, m, _), e = x.lhs.shape, x.rhs.shape[1]
    bounds = jnp.broadcast_to(group_bounds(x.group_sizes, x.group_offset, e, m), (b, e + 1))
    bounds += m * jnp.arange(b, dtype=jnp.int32)[:, None]
    rows, columns = (do, x.lhs) if spec.transpose_rhs else (x.lhs, do)
    rows, columns = rows.reshape(b * m, -1), columns.reshape(b * m, -1)
    plan = Plan(
        groups=b * e,
        rows=rows.shape[1],
        columns=columns.shape[1],
        block_columns=config.block_n,
        depth=config.block_k,
        stages=config.num_stages,
        dtype=np.dtype(do.dtype),
    )
    drhs = multiply_groups(rows, columns, bounds[:, :-1].ravel(), bounds[:, 1:].ravel(), plan)
    drhs = drhs.reshape(b, e, *drhs.shape[1:])
    return drhs.swapaxes(2, 3) if spec.transpose_rhs else drhs
