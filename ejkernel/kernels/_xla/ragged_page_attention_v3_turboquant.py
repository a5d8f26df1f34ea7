"""ragged_page_attention_v3_turboquant in plain JAX: the formula, and its decomposition into blocks of tokens and pages.

Token i of sequence n is at position p = context_lens[n] − q_len[n] + i. The bytes and norms of its key and value are
written to slot `p % page_size` of page `block_tables[n, p // page_size]`; then it attends over the positions up to its
own, whose key and value are quantised, too.
"""

from functools import partial

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3_turboquant import Operands, Outputs
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._pages import over_batch
from ._turboquant import attention, attention_by_formula, heuristic, space, written


def reference(*operands: Array | None, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""

    def step(x: Operands) -> Outputs:
        at, pools = written(x)
        return Outputs(*attention_by_formula(x, pools, at, spec), *pools)

    return over_batch(step, Operands(*operands))


@kernel_registry.register("ragged_page_attention_v3_turboquant", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def ragged_page_attention_v3_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pools with the step's keys and values."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands))


def _step(x: Operands, spec: CacheSpec, config: RaggedPageAttentionConfig) -> Outputs:
    at, pools = written(x)
    return Outputs(*attention(x, pools, at, spec, config), *pools)
