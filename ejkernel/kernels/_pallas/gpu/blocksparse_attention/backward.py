"""The backward kernel: that of flash_attention, where each tile of keys streams the blocks of queries in its list."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._block_lists import full_first
from ejkernel.kernels._visibility import BlockRanges
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from ..flash_attention import configs as of_flash
from ..flash_attention.backward import gradients
from ..flash_attention.backward_plan import Plan
from ..flash_attention.mask_info import MaskInfo
from ..flash_attention.problem import problem_of
from .configs import check
from .forward import tiles


def blocksparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: BlocksparseAttentionSpec,
    config: KernelConfig,
) -> tuple[Array, ...]:
    plan = Plan(problem_of(primals.attention, spec), config.block_q, config.num_stages, listed=True)
    tile = plan.block_q, plan.keys
    of_flash.check("flash_attention_bwd", config, block_k=(plan.keys,))
    check("blocksparse_attention_bwd", tile, primals, spec)
    mask_info = _of_groups(*tiles(primals, spec, tile), plan.problem.G, plan.problem.group)
    return gradients(primals.attention, outputs, cotangents, wrt, spec, mask_info, plan)


def _of_groups(some: Array, full: Array, groups: int, heads: int) -> MaskInfo:
    """The lists of a key/value head: for each tile of keys the tiles of queries of all heads of its group, by head."""
    b, h, rows, columns = some.shape

    def by_group(x):
        of_head = x.reshape(b, groups, heads, rows, columns) if h > 1 else jnp.stack([x] * heads, 2)
        return jnp.moveaxis(of_head, 4, 2).reshape(b, -1, columns, heads * rows)

    length, of_full, blocks = full_first(by_group(some), by_group(full))
    none = jnp.zeros_like(length)
    return MaskInfo(jnp.stack(BlockRanges(none, length, none, of_full), -1), None, None, blocks)
