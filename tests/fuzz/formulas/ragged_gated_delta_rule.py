"""The gated delta rule over packed tokens: that of a batch of one, whose sequences are the places of the pool."""

from .gated_delta_rule import formula as dense


def formula(x, facts, options, rounded):
    """o, and the pool: a place of no token of the step keeps its state."""
    arrays = {name: x[name][None] for name in ("q", "k", "v", "beta", "g")}
    facts = {**facts, "packed": 0.0}
    o, states = dense(arrays | {"initial_state": x["states"]}, facts, {**options, "return_state": True}, rounded)
    return [o[0], states]
