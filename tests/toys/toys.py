"""Operations of another package than this, one of each kind: what it takes to add them.

toy_wave      differentiable    o = sin(rate · x) · w, with a config of its own
toy_lookup    forward only      o = x[at]
toy_append    in place          cache[at] = x, and the sum of what is there now
toy_beat      composed          o = sin(x) · w + sin(rate · x) · w
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.lax._native import native
from ejkernel.modules._composed import composed
from ejkernel.modules._operation import Operation, Prepared
from ejkernel.modules._public_function import public_function
from ejkernel.modules.operations._arguments import align, array, require_dtype, require_rank, static_number
from ejkernel.primitives._axes import axes
from ejkernel.primitives._forward_only import ForwardOnly
from ejkernel.primitives._sharding import Layout
from ejkernel.primitives._trio import Trio
from ejkernel.types import KernelConfig, OperationConfig, ShortRepr

# --- toy_wave ---------------------------------------------------------------------------------------------------------


class WaveOperands(NamedTuple):
    x: Any
    w: Any


class WaveOutputs(NamedTuple):
    o: Any


@dataclass(frozen=True, repr=False)
class WaveSpec(ShortRepr):
    rate: float = 1.0


wave = Trio(
    "toy_wave",
    WaveOperands,
    WaveOutputs,
    {"x": axes("b s d"), "w": axes("b d"), "o": axes("b s d")},
    differentiable=("x", "w"),
    dtypes=lambda dtypes, spec: {"o": dtypes["x"]},
    layout=Layout(split=("b", "d"), group=None),
    residuals=(),
)


@dataclass(frozen=True, repr=False)
class WaveConfig(OperationConfig):
    """The number of batch elements per iteration of the loop."""

    unroll: int = 1


def wave_forward(x, w, *, spec=WaveSpec(), config=WaveConfig()):
    of_one = lambda _, xw: (None, (jnp.sin(spec.rate * _float32(xw[0])) * _float32(xw[1])[None]).astype(x.dtype))
    return WaveOutputs(jax.lax.scan(of_one, None, (x, w), unroll=config.unroll)[1])


def wave_jvp(primals, outputs, tangents, *, spec=WaveSpec(), config=WaveConfig()):
    """ȯ = rate · cos(rate · x) · w · ẋ + sin(rate · x) · ẇ."""
    x, w = map(_float32, primals)
    of_x = 0.0 if tangents.x is None else spec.rate * jnp.cos(spec.rate * x) * w[:, None] * _float32(tangents.x)
    of_w = 0.0 if tangents.w is None else jnp.sin(spec.rate * x) * _float32(tangents.w)[:, None]
    return WaveOutputs((of_x + of_w).astype(primals.x.dtype))


def wave_bwd(primals, outputs, cotangents, *, wrt, spec=WaveSpec(), config=WaveConfig()):
    """dx = rate · cos(rate · x) · w · do,  dw = Σ_s sin(rate · x) · do."""
    (x, w), do = map(_float32, primals), _float32(cotangents.o)
    found = {
        "x": lambda: spec.rate * jnp.cos(spec.rate * x) * w[:, None] * do,
        "w": lambda: (jnp.sin(spec.rate * x) * do).sum(1),
    }
    return tuple(found[name]().astype(getattr(primals, name).dtype) for name in wrt)


def _float32(x):
    return x.astype(np.promote_types(x.dtype, np.float32))


def wave_arguments(
    x: Float[Array, "batch length features"], w: Float[Array, "batch features"], *, rate: float = 1.0
) -> Prepared[Float[Array, "batch length features"]]:
    """A wave of each feature, o = sin(rate · x) · w, with amplitude w."""
    x, w = array("toy_wave", "x", x), array("toy_wave", "w", w)
    require_rank("toy_wave", 3, "batch, length, features", x=x)
    require_rank("toy_wave", 2, "batch, features", w=w)
    require_dtype("toy_wave", np.floating, "a float type", x=x, w=w)
    spec = WaveSpec(static_number("toy_wave", "rate", rate))
    return Prepared(align(wave.forward, dict(x=x, w=w)), spec, lambda out: out["o"])


class ToyWave(Operation):
    algorithm = wave
    config_class = WaveConfig
    prepare_arguments = staticmethod(wave_arguments)

    @classmethod
    def example(cls):
        return dict(x=jax.ShapeDtypeStruct((2, 16, 8), jnp.bfloat16), w=jax.ShapeDtypeStruct((2, 8), jnp.bfloat16))


# --- toy_lookup -------------------------------------------------------------------------------------------------------


class LookupOperands(NamedTuple):
    x: Any
    at: Any


class LookupOutputs(NamedTuple):
    o: Any


@dataclass(frozen=True, repr=False)
class NoOptions(ShortRepr):
    """No choice."""


lookup = ForwardOnly(
    "toy_lookup",
    LookupOperands,
    LookupOutputs,
    {"x": axes("b s d"), "at": axes("b n"), "o": axes("b n d")},
    lambda dtypes, spec: {"o": dtypes["x"]},
    instead="index with x[at]",
    layout=Layout(split=("b", "d"), group=None),
)


def lookup_forward(x, at, *, spec=NoOptions(), config=KernelConfig()):
    return LookupOutputs(jnp.take_along_axis(x, at[..., None], axis=1, mode="clip"))


def lookup_arguments(
    x: Float[Array, "batch length features"], at: Integer[Array, "batch places"]
) -> Prepared[Float[Array, "batch places features"]]:
    """The tokens at given indices: o = x[at]."""
    x, at = array("toy_lookup", "x", x), array("toy_lookup", "at", at)
    require_rank("toy_lookup", 3, "batch, length, features", x=x)
    require_dtype("toy_lookup", np.floating, "a float type", x=x)
    require_dtype("toy_lookup", np.integer, "an integer type", at=at)
    return Prepared(align(lookup.forward, dict(x=x, at=at)), NoOptions(), lambda out: out["o"])


class ToyLookup(Operation):
    algorithm = lookup
    prepare_arguments = staticmethod(lookup_arguments)

    @classmethod
    def example(cls):
        return dict(x=jax.ShapeDtypeStruct((2, 16, 8), jnp.bfloat16), at=jax.ShapeDtypeStruct((2, 3), jnp.int32))

    @classmethod
    def synthetic_operands(cls, operands, spec):
        return super().synthetic_operands(operands, spec) | {"at": jnp.zeros(operands["at"].shape, jnp.int32)}


# --- toy_append -------------------------------------------------------------------------------------------------------


class AppendOperands(NamedTuple):
    cache: Any
    x: Any
    at: Any


class AppendOutputs(NamedTuple):
    total: Any
    new_cache: Any


append = ForwardOnly(
    "toy_append",
    AppendOperands,
    AppendOutputs,
    {"cache": axes("b c d"), "x": axes("b d"), "at": axes("b 1"), "total": axes("b d"), "new_cache": axes("b c d")},
    lambda dtypes, spec: {"total": np.promote_types(dtypes["cache"], np.float32)},
    instead="keep the tokens, and stack them",
    layout=Layout(split=("b", "d"), group=None),
    in_place={"new_cache": "cache"},
)


def append_forward(cache, x, at, *, spec=NoOptions(), config=KernelConfig()):
    new_cache = jax.vmap(lambda cache, x, at: cache.at[at[0]].set(x, mode="drop"))(cache, x, at)
    return AppendOutputs(new_cache.sum(1, dtype=np.promote_types(cache.dtype, np.float32)), new_cache)


def append_arguments(
    cache: Float[Array, "batch places features"], x: Float[Array, "batch features"], at: Integer[Array, " batch"]
) -> Prepared[tuple[Float[Array, "batch features"], Float[Array, "batch places features"]]]:
    """Appends a token to each cache; returns the sum of all its tokens, and the cache."""
    cache, x, at = (array("toy_append", name, a) for name, a in (("cache", cache), ("x", x), ("at", at)))
    require_rank("toy_append", 3, "batch, places, features", cache=cache)
    require_dtype("toy_append", np.floating, "a float type", cache=cache, x=x)
    named = align(append.forward, dict(cache=cache, x=x, at=at.astype(jnp.int32)[:, None]))
    return Prepared(named, NoOptions(), lambda out: (out["total"], out["new_cache"]))


class ToyAppend(Operation):
    algorithm = append
    prepare_arguments = staticmethod(append_arguments)

    @classmethod
    def example(cls):
        array = jax.ShapeDtypeStruct
        sizes = dict(cache=(2, 16, 8), x=(2, 8))
        return {name: array(of, jnp.bfloat16) for name, of in sizes.items()} | {"at": array((2,), jnp.int32)}

    @classmethod
    def synthetic_operands(cls, operands, spec):
        return super().synthetic_operands(operands, spec) | {"at": jnp.zeros(operands["at"].shape, jnp.int32)}


# --- Their registration -----------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {
    "toy_wave": wave_forward,
    "toy_wave_jvp": wave_jvp,
    "toy_wave_bwd": wave_bwd,
    "toy_lookup": lookup_forward,
    "toy_append": append_forward,
}
for name, implementation in IMPLEMENTATIONS.items():
    kernel_registry.register(name, "xla", "any")(implementation)

for operation in (ToyWave, ToyLookup, ToyAppend):
    setattr(ejkernel.lax, operation.algorithm.name, native(operation))
    setattr(ejkernel.modules, operation.algorithm.name, public_function(operation))


# --- toy_beat ---------------------------------------------------------------------------------------------------------


@composed
def toy_beat(
    x: Float[Array, "batch length features"], w: Float[Array, "batch features"], *, rate: float = 1.0
) -> Float[Array, "batch length features"]:
    """Two waves of each feature with different rates: o = sin(x) · w + sin(rate · x) · w."""
    return ejkernel.lax.toy_wave(x, w) + ejkernel.lax.toy_wave(x, w, rate=rate)


ejkernel.lax.toy_beat = ejkernel.modules.toy_beat = toy_beat
