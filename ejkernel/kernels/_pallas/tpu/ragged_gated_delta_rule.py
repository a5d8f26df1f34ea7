"""ragged_gated_delta_rule on TPU: single tokens all at once, and longer sequences by the kernels of gated_delta_rule.

The states of all sequences go into the kernels and come back, which a step without longer ones leaves out.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._ragged_gated_delta_rule import Sequences, as_one_step
from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.kernels._xla.ragged_gated_delta_rule import decoded
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.gated_delta_rule import Operands as Dense
from ejkernel.primitives.ragged_gated_delta_rule import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

from .gated_delta_rule import gated_delta_rule


def supports(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    tokens, sequences = operands.q.shape[1], operands.state_indices.shape[1]
    if tokens <= sequences:
        return f"{tokens} tokens of {sequences} sequences; XLA computes single tokens all at once"
    if sequences == 0:
        return "no sequences"
    return gated_delta_rule.supports(spec, _packed(operands), target)


def space(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> list[RecurrenceConfig]:
    """The configs of gated_delta_rule."""
    return gated_delta_rule.space(spec, _packed(operands), target)


def _packed(x: Operands) -> Dense:
    """The types of the operands of gated_delta_rule for the tokens of a step."""
    spans = jax.ShapeDtypeStruct((*x.state_indices.shape, 2), x.state_indices.dtype)
    return Dense(x.q, x.k, x.v, x.beta, x.g, spans=spans)


@kernel_registry.register("ragged_gated_delta_rule", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=gated_delta_rule.refuses)
@supported_if(supports)
def ragged_gated_delta_rule(
    *operands: Array | None,
    spec: GatedDeltaRuleSpec = GatedDeltaRuleSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> Outputs:
    """o, and the pool with the states after the step."""
    return as_one_step(partial(_step, spec=spec, config=config), Operands(*operands))


def _step(x: Operands, at: Sequences, *, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> tuple[Array, Array]:
    from .gated_delta_rule import kernels

    is_one, is_longer = at.after - at.first == 1, at.after - at.first > 1
    found = decoded(x, spec, jnp.where(is_one, at.first, x.q.shape[0]), at.slot, jnp.zeros(x.v.shape, x.q.dtype))

    def with_longer(o: Array, pool: Array) -> tuple[Array, Array]:
        initial = pool.at[at.slot].get(mode="fill", fill_value=0).astype(jnp.float32)
        spans = jnp.stack([at.first, jnp.where(is_one, at.first, at.after)], -1)
        arrays = (x.q, x.k, x.v, x.beta, x.g, initial, spans)
        of_longer = kernels.gated_delta_rule(
            *(None if a is None else a[None] for a in arrays), spec=spec, config=config
        )
        slot = jnp.where(is_longer, at.slot, pool.shape[0])
        pool = pool.at[slot].set(of_longer.final_state[0].astype(pool.dtype), mode="drop")
        return o + of_longer.o[0], pool  # each is 0 where the other is not

    return lax.cond(is_longer.any(), with_longer, lambda o, pool: (o, pool), *found)
