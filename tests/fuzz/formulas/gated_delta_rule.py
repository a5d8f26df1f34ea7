"""The gated delta rule, token by token."""

import jax
import jax.numpy as jnp


def formula(x, facts, options, rounded):
    """o and the final states: h ← exp(g)·h, then h ← h + k (beta·(v − hᵀk))ᵀ, then o = (scale·q)ᵀ h."""
    (B, S, _, D), H, E = x["q"].shape, *x["v"].shape[2:]
    q, k = (jnp.repeat(x[name], H // x[name].shape[2], axis=2) for name in "qk")
    if options.get("use_qk_l2norm", True):
        q, k = (a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    scale = options.get("softmax_scale")
    q = q * (D**-0.5 if scale is None else scale)
    owner = jnp.asarray(facts["owner"])  # [S, N]: whether a token is of a sequence
    packed = "packed" in facts
    g = x.get("g", jnp.zeros((B, S, H), q.dtype))
    initial = x.get("initial_state", jnp.zeros((owner.shape[1] if packed else B, H, D, E), q.dtype))
    states = initial[None] if packed else initial[:, None]  # [B, N, H, D, E]

    def step(states, token):
        q, k, v, beta, g, owner = token
        owner = owner[:, None, None, None]
        h = jnp.where(owner, states, 0).sum(1) * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhd,bhde->bhe", k, h, precision="highest"))
        h = h + k[..., None] * u[:, :, None]
        o = jnp.einsum("bhd,bhde->bhe", q, h, precision="highest")
        return jnp.where(owner, h[:, None], states), jnp.where(owner.any(), o, 0)

    tokens = (*(jnp.moveaxis(a, 1, 0) for a in (q, k, x["v"], x["beta"], g)), owner)
    states, o = jax.lax.scan(step, states, tokens)
    o = rounded(jnp.moveaxis(o, 0, 1))
    return [o, states[0] if packed else states[:, 0]] if options.get("return_state") else [o]
