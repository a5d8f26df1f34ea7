"""page_attention on TPU: a work item for the single query of each sequence."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.page_attention import PageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from ..._visibility import interval
from . import _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    x, page = operands, operands.k_pages.shape[2]
    reason = _paged.refusal(spec, target, x.q, _caches(x), page)
    if reason is None and not space(spec, x, target):
        reason = _paged.VECTOR_MEMORY
    return reason or _paged.table_refusal(x.q.shape[0] * x.q.shape[1], x.block_tables.size)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[PageAttentionConfig]:
    """The configs worth measuring, the most promising first; none of them depends on the batch."""
    x, page = operands, operands.k_pages.shape[2]
    rows = _paged.rows_of_tile(1, x.q.shape[2] // x.k_pages.shape[3])
    most, scales = x.block_tables.shape[2] * page, (x.k_scale, x.v_scale)
    sizes = _paged.keys_of_blocks(x.q, _caches(x), rows, _paged.piece_of(page), most, scales=scales)
    return [PageAttentionConfig(keys, platform=Platform.PALLAS, backend=Backend.TPU) for keys in sizes]


@kernel_registry.register("page_attention", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: PageAttentionConfig = PageAttentionConfig(),
) -> Outputs:
    """The results o and lse of page_attention, by the Pallas kernels for TPUs."""
    from ._paged.decode import decode

    x = Operands(*operands)
    in_table = x.block_tables.shape[2] * x.k_pages.shape[2]
    first, stop = interval(x.context_lens - 1, spec.left, None, 0, x.context_lens.clip(0, in_table))
    (m, b, h, _), flat = x.q.shape, lambda a: a.reshape(-1, *a.shape[2:])
    batch = jnp.repeat(jnp.arange(m, dtype=jnp.int32), b)
    o, lse = decode(
        flat(x.q), x.k_pages, x.v_pages, flat(first), flat(stop), batch, flat(x.block_tables), x.sinks,
        x.k_scale, x.v_scale, spec=spec, keys=config.keys_per_block, name="page_attention",
    )  # fmt: skip
    valid = flat(x.context_lens)[:, None] > 0
    o, lse = jnp.where(valid[..., None], o, 0), jnp.where(valid, lse, -jnp.inf)
    return Outputs(o.reshape(m, b, h, -1), lse.reshape(m, b, h))


def _caches(x: Operands) -> list[tuple]:
    """The caches of keys and of values, each with the number of heads of a slot."""
    return [(pages, pages.shape[3]) for pages in (x.k_pages, x.v_pages)]
