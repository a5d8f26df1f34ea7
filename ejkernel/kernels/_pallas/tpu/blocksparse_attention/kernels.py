"""blocksparse_attention by the kernels of flash_attention, over the tiles of kept blocks."""

import jax

from ejkernel.kernels._pallas.tpu.flash_attention.backward import backward
from ejkernel.kernels._pallas.tpu.flash_attention.forward import forward, forward_chunk
from ejkernel.kernels._pallas.tpu.flash_attention.tangent import tangent
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from .plan import queries_without_keys, sparse_mask_info, sparse_plan


def blocksparse_attention(*operands: jax.Array | None, spec: BlocksparseAttentionSpec, config: KernelConfig) -> Outputs:
    operands = Operands(*operands)
    problem = sparse_plan(operands, spec, config, chunk=forward_chunk(operands.attention))
    return forward(operands.attention, problem, sparse_mask_info(operands, problem))


def blocksparse_attention_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: BlocksparseAttentionSpec, config: KernelConfig
) -> Outputs:
    problem = sparse_plan(primals, spec, config)
    return tangent(primals.attention, outputs, tangents.attention, problem, sparse_mask_info(primals, problem))


def blocksparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: BlocksparseAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    problem = sparse_plan(primals, spec, config)
    masked, split = queries_without_keys(primals, outputs.lse, spec), config.algorithm == "split"
    mask_info = sparse_mask_info(primals, problem)
    return backward(primals.attention, outputs, cotangents, wrt, problem, mask_info, masked, split)
