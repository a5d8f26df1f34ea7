"""The selective state space of Mamba, token by token."""

import jax
import jax.numpy as jnp


def formula(x, facts, options, rounded):
    """y and the final states: h ← exp(dt·A)∘h + dt·x·B, then y = C·h + D·x."""
    u, A, D = x["x"], x["A"], x.get("D")
    A = A[..., None, :] if u.ndim == 4 else A  # of one feature or of all of a head
    owner = jnp.asarray(facts["owner"])  # [S, N]: whether a token is of a sequence
    packed = "packed" in facts
    batch = owner.shape[1] if packed else u.shape[0]
    initial = x.get("initial_state", jnp.zeros((batch, *u.shape[2:], x["B"].shape[-1]), u.dtype))
    states = initial[None] if packed else initial[:, None]  # [B, N, channels, d]
    # B and C of each channel, [B, S, 1, d] or [B, S, H, 1, d]
    B, C = (_of_channels(x[name], u) for name in "BC")
    dt = x["dt"] if u.ndim == 3 else x["dt"][..., None]
    tokens = (*(jnp.moveaxis(a, 1, 0) for a in (u, dt, B, C)), owner)

    def step(states, token):
        u, dt, B, C, owner = token
        owner = owner.reshape(-1, *(1,) * (states.ndim - 2))
        h = jnp.where(owner, states, 0).sum(1) * jnp.exp(dt[..., None] * A) + (dt * u)[..., None] * B
        y = (h * C).sum(-1)
        y = y if D is None else y + D.reshape(*D.shape, *(1,) * (u.ndim - 2)) * u
        return jnp.where(owner, h[:, None], states), jnp.where(owner.any(), y, 0)

    states, y = jax.lax.scan(step, states, tokens)
    y = rounded(jnp.moveaxis(y, 0, 1))
    return [y, states[0] if packed else states[:, 0]] if options.get("return_state") else [y]


def _of_channels(a, u):
    if u.ndim == 3:
        return a[:, :, None]
    return jnp.repeat(a, u.shape[2] // a.shape[2], axis=2)[:, :, :, None]
