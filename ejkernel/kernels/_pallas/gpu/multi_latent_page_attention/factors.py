"""Products over pages of eight bits: in float16, to which these numbers are converted with few instructions.

A row of queries in bfloat16 is made float16 times a power of two, and its logits are multiplied by the inverse. One
scale of all slots is a factor of the logits and of o. Where slots have scales of their own, products are in q's dtype:
consumers multiply the logits of a key by its scale, and its weights, which in float16 might then overflow.
"""

from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.float16 import ROWS_AT_ONCE, rows_to_float16
from .._launch import PER_ROW, load_vector, sync
from .plan import CONSUMERS, Q_ROUNDED, Keys, Plan


def round_queries(shared: Any, number: int, plan: Plan) -> None:
    """Consumer `number` makes its share of the queries float16, and waits for that of the other."""
    parts = [part.at[0] for part in shared.q[0]]
    for first in range(ROWS_AT_ONCE * number, plan.rows, ROWS_AT_ONCE * CONSUMERS):
        rows_to_float16(parts, shared.q_factors, first)
    plgpu.commit_smem()
    sync(Q_ROUNDED, CONSUMERS)


def factors_of_rows(shared: Any, keys: Keys, plan: Plan, layout: Any = PER_ROW) -> Array | None:
    """What logits are multiplied by, for each row, if by anything but the scales of slots."""
    if not plan.rounds_queries:
        return None
    factors, scale = load_vector(shared.q_factors, layout), scale_of_all(keys, plan)
    return factors if scale is None else factors * scale


def scale_of_all(keys: Keys, plan: Plan) -> Array | None:
    """The scale of all slots, if they have one together."""
    return None if keys.scales is None or plan.scales_slots else keys.scales[0, 0]
