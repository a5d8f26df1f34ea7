"""ragged_page_attention_v2_turboquant in plain JAX: the formula, and its decomposition into blocks of tokens and pages.

Token i of sequence n is at position context_lens[n] − q_len[n] + i, and key j of the sequence is in slot
`j % page_size` of page `block_tables[n, j // page_size]`, as the bytes and norms of TurboQuant.
"""

from functools import partial

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v2_turboquant import Operands, Outputs
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._places import Places, places
from .._registry import Backend, Platform, configured_by, kernel_registry
from ._pages import over_batch
from ._turboquant import attention, attention_by_formula, heuristic, pools_of, space


def reference(*operands: Array | None, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""
    step = lambda x: Outputs(*attention_by_formula(x, pools_of(x), _places(x), spec))
    return over_batch(step, Operands(*operands))


@kernel_registry.register("ragged_page_attention_v2_turboquant", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def ragged_page_attention_v2_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention_v2_turboquant, in XLA."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands))


def _step(x: Operands, spec: CacheSpec, config: RaggedPageAttentionConfig) -> Outputs:
    return Outputs(*attention(x, pools_of(x), _places(x), spec, config))


def _places(x: Operands) -> Places:
    return places(x.q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs)
