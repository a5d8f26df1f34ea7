"""state_space_v2 beside the kernels of Mamba-2's authors."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.modules import state_space_v2
from ejkernel.types.shapes.state_space_v2 import StateSpaceV2Shape

from . import _referee
from ._contenders import Inputs, arrays_of, call, imported, normal, of_ours, of_torch, torch_on_gpu
from ._driver import Case
from ._harness import Check

_CHUNK = 256  # tokens, the default of mamba_ssm's layer


def case(shape: StateSpaceV2Shape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = _inputs(shape, dtype)
    ours = of_ours("state_space_v2", platforms, _ours, mode, given)
    return Case(
        [*ours, of_torch("mamba_ssm", partial(_mamba, given), mode, given)],
        cache(partial(_check, shape, mode, given)),
        largest_error=3.0,
    )


@lru_cache(maxsize=1)
def _inputs(shape: StateSpaceV2Shape, dtype: Any) -> Inputs:
    """Decay rates from −1 to −16 and steps from 0.001 to 0.1, as Mamba-2 initialises them; the rest is normal."""
    arrays = arrays_of(shape, dtype)
    arrays["A"] = -jnp.linspace(1.0, 16.0, shape.heads)
    arrays["dt"] = 1e-3 * 100.0 ** jax.scipy.stats.norm.cdf(arrays["dt"])
    others = {name: arrays.pop(name) for name in ("A", "D")}
    return Inputs(tuple(arrays.values()), normal(jax.random.key(1), shape.sizes["x"], dtype), others=others)


def _ours(platform: str | None) -> Callable[..., Array]:
    return lambda x, B, C, dt, A, D: state_space_v2(x, A, B, C, D, dt, platform=platform)


def _mamba(given: Inputs) -> Callable[..., Any]:
    scan = imported("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    A, D = (torch_on_gpu().from_dlpack(given.others[name]) for name in ("A", "D"))
    return lambda x, B, C, dt: scan(x, dt, A, B, C, _CHUNK, D=D)


def _check(shape: StateSpaceV2Shape, mode: str, given: Inputs) -> Check:
    """Judges the first sequence and the last group, whose heads share B and C, by the recurrence in chunks in XLA.

    The unit of an error is that of the same in float32, rounded.
    """
    heads = shape.heads // shape.groups
    part = lambda a: a[:1, :, -heads:] if a.shape[2] == shape.heads else a[:1, :, -1:]
    decays = tuple(given.others[name][-heads:] for name in ("A", "D"))

    def exact(dtype: Any) -> Sequence[Array]:
        *operands, A, D, do = (
            jnp.asarray(a, dtype) for a in (*map(part, given.operands), *decays, part(given.cotangent))
        )
        return jax.jit(call(partial(_ours("xla"), A=A, D=D), mode))(tuple(operands), (), do)

    return _referee.check_by_rounding(lambda results: [part(a) for a in results], exact, given.cotangent.dtype)
