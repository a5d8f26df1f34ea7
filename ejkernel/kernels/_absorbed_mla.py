"""The absorbed forward of flash_mla: few queries attend to the latents themselves, one key and value for all heads.

With c_j the latent of position j, r_j its rotary part, the projections W of keys and U of values of a head h, and a
query q_ih = [n_ih, m_ih] that is divided as its key is,

    q_ih · k_jh = (n_ih W_hᵀ)·c_j + m_ih·r_j                o_ih = Σ_j p_ijh (c_j U_h) = (Σ_j p_ijh c_j) U_h

so the queries [n_ih W_hᵀ, m_ih] of R + Dr features attend to keys [c_j, r_j] with values c_j, and U projects what they
find. No array has the keys or values of every head. Of a batch element whose queries see P pairs, the forms cost

                flops                                            numbers that are written and read again
    expanded    2·K·R·H·(Dn + V) + 2·P·H·(Dn + Dr + V)           K·H·(Dn + Dr + V)
    absorbed    2·S·R·H·(Dn + V) + 2·P·H·(R + Dr + R)            K·(R + Dr) + S·H·(R + Dr + R)

and both read the latents. The number of batch elements is not in it, so that the choice is the same in any batch.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import KernelConfig, visible_pairs

from ._flash_mla import named, product, statistics_dtype

# Flops of a product in the time in which memory writes or reads a byte: between some 10 of a CPU and 200 of a GPU.
FLOPS_OF_A_BYTE = 64


def absorbs(x: Operands, spec: FlashAttentionSpec) -> bool:
    """Whether the absorbed form of a call (arrays or shapes) costs less than the expanded one, by the count above."""
    (_, queries, heads, features), (_, keys, latent) = x.q.shape, x.kv_latent.shape
    if any(map(is_symbolic_dim, (queries, heads, keys))):
        return False
    values = x.w_vc.shape[3]
    expanded, absorbed = features + values, latent + x.k_rope.shape[2] + latent
    pairs = visible_pairs(queries, keys, spec.causal, spec.window)

    def cost(projected: int, width: int, numbers: int) -> int:
        flops = projected * latent * (x.w_kc.shape[3] + values) + pairs * width
        return 2 * (heads * flops + FLOPS_OF_A_BYTE * x.q.dtype.itemsize * numbers)

    of_absorbed = keys * (absorbed - latent) + queries * heads * absorbed
    return cost(queries, absorbed, of_absorbed) < cost(keys, expanded, keys * heads * expanded)


def forward(attend: Callable[..., Outputs], x: Operands, spec: FlashAttentionSpec, config: KernelConfig) -> Outputs:
    """o and lse, where `attend` is a forward of flash_attention whose q may have a wider dtype than k and v.

    So queries and results over latents are not rounded between the products.
    """
    one_head = lambda a: lax.expand_dims(a, (2,))
    q = jnp.concatenate(_in_latents(x), axis=-1)
    o, lse = attend(*x._replace(q=q).attention(one_head(_slots(x)), one_head(x.kv_latent)), spec=spec, config=config)
    return Outputs(_values(o, x), lse)


def _slots(x: Operands) -> Array:
    """The latents and rotary parts [c_j, r_j] of all positions, [b,t,c+y]."""
    return jnp.concatenate([x.kv_latent, x.k_rope], axis=-1)


def _in_latents(x: Operands) -> tuple[Array, Array]:
    """The parts n Wᵀ [b,s,h,c] and m [b,s,h,y] of queries over latents, in the dtype of statistics."""
    (axes, w), features = named(x.w_kc), x.w_kc.shape[3]
    latent = product(f"bshn,{axes}->bshc", x.q[..., :features], w)
    return latent, x.q[..., features:].astype(statistics_dtype(x.q))


def _values(o: Array, x: Operands) -> Array:
    """The values Σ_c o [b,s,h,c] · w_vc [b?,c,h,e] -> [b,s,h,e], in the dtype of q."""
    axes, w = named(x.w_vc.astype(o.dtype))
    return product(f"bshc,{axes}->bshn", o, w).astype(x.q.dtype)
