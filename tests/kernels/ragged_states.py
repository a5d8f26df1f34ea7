"""Calls of ragged_gated_delta_rule that kernels are compared by, and what is right."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.ragged_gated_delta_rule import reference
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.ragged_gated_delta_rule import Operands

MIXED = (0, 1, 1, 34, 35, 52, 53)
CALLS = {
    "prefill and decode": {},
    "decode alone": dict(cuts=tuple(range(9))),
    "drafts": dict(cuts=(0, 1, 3, 6, 10, 15, 20, 24, 27)),
    "a prefill, and fewer tokens than sequences": dict(cuts=(0, 0, 1, 7, 7, 7, 9, 9, 9, 9, 9, 10), tokens=11),
    "one sequence": dict(cuts=(0, 70)),
    "tokens of no sequence": dict(cuts=(3, 4, 30, 30, 47), tokens=60),
    "places outside the pool": dict(slots=(9, -1, 3, 50, 0, 7)),
    "a batch of steps": dict(batch=2),
    "a pool in bfloat16": dict(of_states="bfloat16"),
    "no decay": dict(decay=None),
    "all is forgotten at some tokens": dict(resets=0.2),
    "keys as they are": dict(normalised=False),
    "24 and 40 features, a head each": dict(h=3, g=3, d=24, e=40),
    "more columns than keys": dict(h=2, g=1, d=16, e=136),
}


def operands(
    dtype,
    cuts=MIXED,
    slots=None,
    tokens=None,
    batch=1,
    h=4,
    g=2,
    d=32,
    e=32,
    decay=0.5,
    resets=0.0,
    normalised=True,
    of_states="float32",
    seed=0,
):
    """Tokens of no sequence, and states that no sequence reads, are NaN."""
    rng, n, p = np.random.default_rng(seed), len(cuts) - 1, 12
    t = tokens or cuts[-1]
    normal = lambda *shape: rng.standard_normal((batch, *shape))
    token = np.arange(t)
    inside = ((token >= cuts[0]) & (token < cuts[-1]))[None, :, None]
    q, k, v = (normal(t, heads, size) for heads, size in ((g, d), (g, d), (h, e)))
    k = k if normalised else 0.5 * d**-0.5 * k
    log_decay = None
    if decay is not None:
        log_decay = -decay * rng.uniform(size=(batch, t, h))
        log_decay = np.where(rng.uniform(size=log_decay.shape) < resets, -np.inf, log_decay)
    slot = np.stack([rng.permutation(p)[:n] for _ in range(batch)]) if slots is None else np.asarray([slots] * batch)
    states = np.full((batch, p, h, d, e), np.nan)
    for b in range(batch):
        read = [x for x in slot[b] if 0 <= x < p]
        states[b, read] = rng.standard_normal((len(read), h, d, e))
    of = lambda x, dtype=dtype: None if x is None else jnp.asarray(x, dtype)
    hidden = lambda x: None if x is None else np.where(inside.reshape(1, t, *[1] * (x.ndim - 2)), x, np.nan)
    q, k, v, beta, log_decay = map(hidden, (q, k, v, rng.uniform(size=(batch, t, h)), log_decay))
    tables = (of(np.asarray([cuts] * batch), jnp.int32), of(slot, jnp.int32))
    x = Operands(of(q), of(k), of(v), of(beta), of(states, of_states), *tables, of(log_decay, jnp.float32))
    return x, GatedDeltaRuleSpec(d**-0.5 if normalised else 1.0, normalised)


def check(o, states, x: Operands, spec, tolerance: float) -> None:
    """Both are those of the formula in float64, up to the rounding of states to the dtype of the pool."""
    wide = lambda a: jnp.asarray(a, jnp.float64) if a is not None and jnp.issubdtype(a.dtype, jnp.floating) else a
    with jax.enable_x64(True):
        wanted = reference(*map(wide, x), spec=spec)
    rounding = float(jnp.finfo(x.states.dtype).eps)
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted.o, atol=tolerance, rtol=tolerance)
    for found, right, at in zip(states, wanted.new_states, x.state_indices, strict=True):
        # A state that no sequence has stays as it is, NaN.
        np.testing.assert_allclose(
            np.asarray(found, np.float64), right, atol=tolerance + rounding, rtol=tolerance + rounding, err_msg=str(at)
        )
