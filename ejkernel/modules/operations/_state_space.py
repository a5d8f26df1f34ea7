"""The state spaces of Mamba and Mamba-2: the common path from public arguments to the operands of the primitive."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import value_error
from ...ops.utils.operands import random_like
from ...primitives._trio import Trio
from ...primitives.state_space_v1 import StateSpaceSpec
from ...types.recurrence import RecurrenceConfig
from .._operation import Prepared
from ._arguments import align, array, array_or_none, require_dtype, require_rank, static_bool
from ._recurrence import spans_of, states_of, synthetic_spans


def prepare(
    algorithm: Trio, operands: type, arrays: Mapping[str, Any], initial_state: Any, cu_seqlens: Any, return_state: Any
) -> Prepared:
    """A checked call, in which x and dt have heads or channels, and B and C have the state's features."""
    name = algorithm.name
    arrays = {of: (array_or_none if of == "D" else array)(name, of, x) for of, x in arrays.items()}
    given = {of: x for of, x in arrays.items() if x is not None}
    require_dtype(name, np.floating, "a float type", **given)
    for of, x in given.items():
        axes = [a.letter for a in algorithm.forward.table[of] if not a.optional]
        require_rank(name, len(axes), ", ".join(_AXES[letter] for letter in axes), **{of: x})
        if 0 in x.shape[x.ndim - 1 :] or (x.ndim == 4 and x.shape[2] == 0):
            raise value_error(name, f"{of} has the shape {x.shape}; only batch and length may be 0", **{of: x})
    x, B = arrays["x"], arrays["B"]
    if x.ndim == 4 and x.shape[2] % B.shape[2]:
        rule = "heads must be a multiple of groups"
        raise value_error(name, f"B has {B.shape[2]} groups but x has {x.shape[2]} heads; {rule}", x=x, B=B)
    spans = spans_of(name, cu_seqlens, x, "x")
    state = "channels, numbers of the state" if x.ndim == 3 else "heads, features, numbers of the state"
    initial_state = states_of(name, initial_state, x, (*x.shape[2:], B.shape[-1]), spans, state)
    # In the dtype of their gradients, which are sums over all rows, those of a vmap included: a sum is rounded once.
    of_batch = lambda a: None if a is None else a.astype(np.promote_types(x.dtype, np.float32))[None]
    arrays |= dict(A=of_batch(arrays["A"]), D=of_batch(arrays["D"]))
    filled = operands(**arrays, initial_state=initial_state, spans=spans)._asdict()
    named = align(algorithm.forward, {of: a for of, a in filled.items() if a is not None})
    return_state = static_bool(name, "return_state", return_state)

    def finish(out: dict[str, Any]):
        o, final = out["o"], out["final_state"]
        final = final[:, 0] if spans is None else final[0]
        return (o, final) if return_state else o

    return Prepared(named, StateSpaceSpec(), finish)


_AXES = dict(b="batch", s="length", h="heads", g="groups", d="numbers of the state", e="features")


class StateSpace:
    """The configs and synthetic operands of both state spaces, for tuning and benchmarks."""

    config_class = RecurrenceConfig

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: StateSpaceSpec) -> dict[str, Any]:
        """Steps of about a tenth, decays of about 1, and sequences of unequal lengths."""
        del spec
        values = random_like({name: x for name, x in operands.items() if name != "spans"})
        of = lambda name, f: f(values[name].astype(jnp.float32)).astype(values[name].dtype)
        values |= dict(A=of("A", lambda a: -jax.nn.softplus(a)), dt=of("dt", lambda a: jax.nn.softplus(a - 2)))
        return values | synthetic_spans(operands, operands["x"].shape[1])
