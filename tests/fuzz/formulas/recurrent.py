"""The linear recurrence, token by token; gla and lightning_attention are this with some of its decays."""

import jax
import jax.numpy as jnp
import numpy as np


def formula(x, facts, options, rounded):
    """o and the final states: h ← diag(exp gk)·h·diag(exp gv)·exp(g + g_gamma) + k vᵀ, then o = (scale·q)ᵀ h."""
    q, (B, S, H, D), E = x["q"], x["q"].shape, x["v"].shape[-1]
    k, v = (jnp.repeat(x[name], H // x[name].shape[2], axis=2) for name in "kv")
    scale = options.get("softmax_scale")
    q = rounded(q * x["softmax_scale"]) if "softmax_scale" in x else q * (D**-0.5 if scale is None else scale)
    owner = jnp.asarray(facts["owner"])  # [S, N]: whether a token is of a sequence
    N = owner.shape[1]
    packed = "packed" in facts
    head = x.get("g_gamma", facts.get("g_gamma", np.zeros(H))).astype(q.dtype) + x.get(
        "g", jnp.zeros((B, S, H), q.dtype)
    )
    decay = head[..., None, None]
    decay = decay + (x["gk"][..., None] if "gk" in x else 0) + (x["gv"][..., None, :] if "gv" in x else 0)
    initial = x.get("initial_state", jnp.zeros((N if packed else B, H, D, E), q.dtype))
    states = initial[None] if packed else initial[:, None]  # [B, N, H, D, E]

    def step(states, token):
        q, k, v, decay, owner = token
        owner = owner[:, None, None, None]
        h = jnp.where(owner, states, 0).sum(1) * jnp.exp(decay) + k[..., None] * v[:, :, None]
        o = jnp.einsum("bhd,bhde->bhe", q, h, precision="highest")
        return jnp.where(owner, h[:, None], states), jnp.where(owner.any(), o, 0)

    tokens = (*(jnp.moveaxis(a, 1, 0) for a in (q, k, v, decay)), owner)
    states, o = jax.lax.scan(step, states, tokens, reverse=bool(options.get("reverse")))
    o = rounded(jnp.moveaxis(o, 0, 1))
    return [o, states[0] if packed else states[:, 0]] if options.get("return_state") else [o]


def owners(cuts, tokens):
    """[tokens, sequences]: whether a token is of a sequence."""
    token, cuts = np.arange(tokens)[:, None], np.asarray(cuts, np.int64)
    return (cuts[:-1] <= token) & (token < cuts[1:])
