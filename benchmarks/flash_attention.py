"""flash_attention beside its rivals, which are in `_attention_rivals`."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.types import AttentionShape
from ejkernel.types.visible import band

from . import _referee
from ._attention import first_group, inputs
from ._attention_rivals import contenders
from ._contenders import Inputs
from ._driver import Case
from ._harness import Check


def case(shape: AttentionShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One call in one mode."""
    given = inputs(shape, dtype)
    return Case(contenders(shape, mode, given, platforms), cache(partial(check, shape, mode, given)))


def check(shape: AttentionShape, mode: str, given: Inputs) -> Check:
    """Judges the first head by the formula."""
    sinks = given.others.get("sinks")
    options = dict(scale=shape.head_dim**-0.5, softcap=shape.softcap)
    options |= {} if sinks is None else dict(sinks=first_group(sinks, shape.kv_heads))
    left, right = band(shape.causal, shape.window)
    columns = jnp.arange(shape.seq_k)

    def visible(i: Array) -> Array:
        at = i + shape.seq_k - shape.seq_q
        return (True if left is None else columns >= at - left) & (True if right is None else columns <= at + right)

    formula = lambda q, k, v: _referee.attention(q, k[:, 0], v[:, 0], visible, **options)
    return _referee.check_of_a_head(mode, given, shape.kv_heads, formula)
