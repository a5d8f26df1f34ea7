"""The parts of the keys that thread blocks attended to, and the sinks, merged by a launch of Triton."""

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._triton._paged.parts import merge_parts
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs

from .plan import Plan


def merged(o: Array, lse: Array, x: Operands, plan: Plan) -> Outputs:
    """The outputs of all parts, and the sinks, as one."""
    (B, T, H, R), sinks = x.q_latent.shape, None
    if plan.splits == 1 and x.sinks is None:
        return Outputs(o.reshape(B, T, H, R), lse[:, 0].reshape(B, T, H))
    if x.sinks is not None:  # a token of no sequence has none
        sinks = jnp.where(is_of_a_sequence(x)[..., None], jax.nn.logsumexp(x.sinks, axis=-1)[:, None], -jnp.inf)
        sinks = sinks.reshape(-1)
    o, lse = merge_parts(o.reshape(-1, R), lse, sinks, plan.splits, B * T * H, x.q_latent.dtype)
    return Outputs(o.reshape(B, T, H, R), lse.reshape(B, T, H))


def is_of_a_sequence(x: Operands) -> Array:
    """[b,t] bool, whether a token is of any sequence."""
    token = jnp.arange(x.q_latent.shape[1], dtype=jnp.int32)
    end = jnp.take_along_axis(x.query_start_loc, jnp.clip(x.num_seqs, 0, x.context_lens.shape[1]), 1)
    return (token >= x.query_start_loc[:, :1]) & (token < end)
