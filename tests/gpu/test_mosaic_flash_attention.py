"""flash_attention in Mosaic GPU on a Hopper GPU: every supported feature against the formula in float64."""

import itertools
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    supports,
    supports_bwd,
    supports_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import FEATURES, space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .attention_cases import (
    CASES,
    CAUSAL,
    Case,
    check,
    derivatives,
    differentiable,
    like,
    poisoned,
    poisoned_cotangents,
)
from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER
FITTING = [replace(case, D=64, V=64) for case in CASES]
TAKEN = [case for case in FITTING if supports(*reversed(case.make(256, jnp.bfloat16)), TARGET) is None]


class Judged(NamedTuple):
    """A call, its cotangents and tangents, and the formula's results in float64 and in the dtype of the call."""

    x: Operands
    spec: FlashAttentionSpec
    cotangents: Outputs
    tangents: dict[str, jax.Array]
    exact: tuple
    rounded: tuple


@cache
def judged(case: Case, length: int, dtype) -> Judged:
    """Computed once for all configs of a case."""
    x, spec = case.make(length, dtype)
    assert supports(spec, x, TARGET) is None
    (B, S, H, _), V = x.q.shape, x.v.shape[3]
    o, lse = jax.ShapeDtypeStruct((B, S, H, V), dtype), jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    cotangents = like(Outputs(o, lse), 2)
    tangents = {name: like(getattr(x, name), 1) for name in differentiable(x)}
    results = (derivatives(x, spec, cotangents, tangents, precision) for precision in (jnp.float64, dtype))
    return Judged(x, spec, cotangents, tangents, *results)


@cache
def outputs(case: Case, length: int, dtype, config: KernelConfig | None = None) -> Outputs:
    x, spec, *_ = judged(case, length, dtype)
    config = config or space("flash_attention", x, spec, TARGET)[0]
    return jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(poisoned(x, spec))


def compare_forward(case: Case, length: int, dtype, config: KernelConfig | None = None):
    *_, exact, rounded = judged(case, length, dtype)
    for name, *arrays in zip(Outputs._fields, outputs(case, length, dtype, config), exact[0], rounded[0], strict=True):
        check(name, *arrays, factor=2)


def compare_tangent(case: Case, length: int, dtype, config: KernelConfig | None = None):
    x, spec, _, tangents, exact, rounded = judged(case, length, dtype)
    config = config or space("flash_attention_jvp", x, spec, TARGET)[0]
    moving = x._replace(**{name: tangents.get(name) for name in x._fields})
    tangent = jax.jit(lambda *a: flash_attention_jvp(*a, spec=spec, config=config))
    moved = tangent(poisoned(x, spec), outputs(case, length, dtype), poisoned(x, spec, moving))
    for name, *arrays in zip(Outputs._fields, moved, exact[2], rounded[2], strict=True):
        check(f"{name}_dot", *arrays, factor=3)


def compare_backward(case: Case, length: int, dtype, config: KernelConfig | None = None):
    x, spec, cotangents, _, exact, rounded = judged(case, length, dtype)
    assert supports_bwd(spec, x, TARGET) is None
    config, wrt = config or space("flash_attention_bwd", x, spec, TARGET)[0], differentiable(x)
    backward = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=wrt, spec=spec, config=config))
    cotangents = poisoned_cotangents(cotangents, x, spec)
    gradients = backward(poisoned(x, spec), outputs(case, length, dtype), cotangents)
    for name, gradient in zip(wrt, gradients, strict=True):
        check(f"d{name}", gradient, exact[1][name], rounded[1][name], factor=3)


COMPARE = {
    "flash_attention": compare_forward,
    "flash_attention_jvp": compare_tangent,
    "flash_attention_bwd": compare_backward,
}


PREDICATES = {
    "flash_attention": supports,
    "flash_attention_jvp": supports_jvp,
    "flash_attention_bwd": supports_bwd,
}
HEAD_DIMS = [*range(16, 65, 8), 72, 80, 88, 96, 104, 112, 128, 144, 160, 176, 192, 200, 224, 248, 256]
HEAD_DIMS = [*((D, D) for D in [*HEAD_DIMS, 136]), (192, 128), (96, 64), (64, 128), (72, 104), (40, 72), (256, 16)]
HEAD_DIMS += [(24, 256), (40, 256), (80, 160), (160, 40), (256, 72)]


def compare(case: Case, length: int, dtype):
    """The outputs, tangents and gradients, by the heuristic configs, of the kernels that take the call; those with a
    bias or a mask are in test_mosaic_pairs.py.
    """
    x, spec = case.make(length, dtype)
    for operation, compare_operation in COMPARE.items():
        pairs = case.bias is not None or case.mask is not None
        if operation == "flash_attention" or (not pairs and PREDICATES[operation](spec, x, TARGET) is None):
            compare_operation(case, length, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_feature(case, dtype):
    compare(case, 300, dtype)


@pytest.mark.parametrize("operation", COMPARE)
@pytest.mark.parametrize("D, V", FEATURES)
def test_configs_of_feature_sizes(D, V, operation):
    case = Case("sizes", S=0.9, H=4, G=2, D=D, V=V, spec=CAUSAL)
    x, spec = case.make(640, jnp.bfloat16)
    for config in space(operation, x, spec, TARGET):
        COMPARE[operation](case, 640, jnp.bfloat16, config)


@pytest.mark.parametrize("operation", COMPARE)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D, V", HEAD_DIMS)
def test_configs_of_head_dims(D, V, causal, operation):
    """Keys that end within a block, more queries than keys, grouped heads, and more than one tile a thread block."""
    case = Case("head dims", S=1.1, H=4, G=2, D=D, V=V, spec=FlashAttentionSpec(causal=causal))
    x, spec = case.make(600, jnp.bfloat16)
    if reason := PREDICATES[operation](spec, x, TARGET):
        pytest.skip(reason)
    for config in space(operation, x, spec, TARGET):
        COMPARE[operation](case, 600, jnp.bfloat16, config)


@pytest.mark.parametrize("D, V", [(40, 40), (72, 72), (96, 96), (112, 72), (160, 160), (192, 192)])
@pytest.mark.parametrize(
    "sight",
    [
        dict(segments=True),
        dict(packed=True),
        dict(sinks=1),
        dict(spec=FlashAttentionSpec(causal=True, window=(90, None))),
    ],
    ids=lambda x: next(iter(x)),
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.dtype.name)
def test_sight_of_head_dims(dtype, sight, D, V):
    case = Case("sight", H=4, G=2, D=D, V=V, **(dict(spec=CAUSAL) | sight))
    x, spec = case.make(700, dtype)
    for operation, compare_operation in COMPARE.items():
        if PREDICATES[operation](spec, x, TARGET) is None:
            compare_operation(case, 700, dtype)


@pytest.mark.parametrize("D", [72, 96, 160])
def test_neighbouring_heads_do_not_mix(D):
    """A tile is wider than 72 features: the memory after them, here NaN, belongs to the next head."""
    x, spec = Case("heads", H=3, G=3, D=D, V=D, spec=CAUSAL).make(600, jnp.bfloat16)
    poison = lambda a: a.at[:, :, 1].set(jnp.nan)
    (config, *_) = space("flash_attention", x, spec, TARGET)
    run = jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))
    clean, poisoned_heads = run(x), run(x._replace(q=poison(x.q), k=poison(x.k), v=poison(x.v)))
    for head in (0, 2):
        np.testing.assert_array_equal(*(np.asarray(y.o[:, :, head], np.float32) for y in (clean, poisoned_heads)))


@pytest.mark.parametrize("D", [72, 80, 96, 136, 160])
def test_gradients_of_neighbouring_heads_do_not_mix(D):
    """dq is accumulated in any order."""
    x, spec, cotangents, *_ = judged(case := Case("heads", H=3, G=3, D=D, V=D, spec=CAUSAL), 600, jnp.bfloat16)
    poison = lambda a: a.at[:, :, 1].set(jnp.nan)
    (config, *_) = space("flash_attention_bwd", x, spec, TARGET)
    run = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=("q", "k", "v"), spec=spec, config=config))
    clean, cotangents = outputs(case, 600, jnp.bfloat16), cotangents._replace(lse=None)
    of_nan = clean._replace(o=poison(clean.o)), cotangents._replace(o=poison(cotangents.o))
    poisoned_heads = x._replace(q=poison(x.q), k=poison(x.k), v=poison(x.v))
    gradients = zip(run(x, clean, cotangents), run(poisoned_heads, *of_nan), strict=True)
    for (name, (a, b)), head in itertools.product(zip("qkv", gradients, strict=True), (0, 2)):
        a, b = (np.asarray(gradient[:, :, head], np.float32) for gradient in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * np.abs(a).max() if name == "q" else 0, err_msg=name)


@pytest.mark.parametrize("D, V", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("sight", [dict(segments=True), dict(packed=True), dict(sinks=1)], ids=lambda x: next(iter(x)))
def test_sight_of_feature_sizes(sight, D, V):
    spec = FlashAttentionSpec(causal=True, softcap=None if "packed" in sight else 3.0)
    compare(Case("sight", H=4, G=2, D=D, V=V, spec=spec, **sight), 700, jnp.bfloat16)


@pytest.mark.parametrize("window", [(None, None), (700, None), (100, 30)])
def test_long(window):
    """More tiles than the device runs at once, and loops that wrap around the stages many times."""
    spec = FlashAttentionSpec(causal=window[1] is None, window=window)
    compare(Case("long", B=1, H=10, G=2, D=128, V=128, spec=spec), 1792, jnp.bfloat16)


@pytest.mark.parametrize("length, D", [(200, 128), (1990, 128), (1990, 64)])
def test_no_mask(length, D):
    """Few tiles, and more than run at once; keys end within a block."""
    case = Case("no mask", B=1, H=10, G=2, D=D, V=D, spec=FlashAttentionSpec())
    for config in space("flash_attention", *case.make(length, jnp.bfloat16), TARGET):
        compare_forward(case, length, jnp.bfloat16, config)


def test_reruns_give_the_same_bits():
    x, spec = Case("again", H=4, G=2, D=128, V=128, spec=CAUSAL).make(1000, jnp.bfloat16)
    config = space("flash_attention", x, spec, TARGET)[0]
    first, second = (jax.jit(lambda x: flash_attention(*x, spec=spec, config=config))(x) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


SIGHT = {
    "full": dict(spec=FlashAttentionSpec()),
    "causal": dict(spec=CAUSAL),
    "window": dict(S=1.0, spec=FlashAttentionSpec(causal=True, window=(300, None))),
    "segments": dict(segments=True, spec=CAUSAL),
    "packed": dict(packed=True, spec=CAUSAL),
}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("D, V", [(128, 128), (64, 64), (96, 96), (72, 72), (192, 128), (256, 256)])
def test_certain_gradients(D, V, sight):
    """More thread blocks than run at once: right, and the same bits in 20 runs while others keep the device busy."""
    case = Case("certain", H=12, G=6, D=D, V=V, **(dict(S=0.5) | SIGHT[sight]))
    spec = replace(case.spec, deterministic=True)
    case = replace(case, spec=spec)
    compare_backward(case, 1500, jnp.bfloat16)
    x, spec, cotangents, *_ = judged(case, 1500, jnp.bfloat16)
    (config, *_) = space("flash_attention_bwd", x, spec, TARGET)
    backward = jax.jit(lambda *a: flash_attention_bwd(*a, wrt=("q", "k", "v"), spec=spec, config=config))
    call = x, outputs(case, 1500, jnp.bfloat16), cotangents
    first = jax.tree.map(np.asarray, backward(*call))
    for again in [backward(*call) for _ in range(20)]:
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a.view(np.uint16), np.asarray(b).view(np.uint16))


def test_certain_gradients_of_more_tiles_than_multiprocessors():
    """With full attention group after group is added."""
    x, spec = Case("long", B=1, H=3, G=1, D=64, V=64).make(18000, jnp.bfloat16)
    spec = replace(spec, deterministic=True)
    configs = [space(name, x, spec, TARGET)[0] for name in ("flash_attention", "flash_attention_bwd")]
    run = jax.jit(lambda x: flash_attention(*x, spec=spec, config=configs[0]))
    call = x, run(x), Outputs(like(x.v[:, :, :1].repeat(3, 2), 5), None)
    gradients = lambda spec: jax.jit(
        lambda *a: flash_attention_bwd(*a, wrt=("q", "k", "v"), spec=spec, config=configs[1])
    )
    first, second = (jax.tree.map(np.asarray, gradients(spec)(*call)) for _ in range(2))
    unordered = gradients(replace(spec, deterministic=False))(*call)
    for a, b, c in zip(first, second, unordered, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
        a, c = (np.asarray(x, np.float32) for x in (a, c))
        assert np.linalg.norm(a - c) <= 1e-2 * np.linalg.norm(c)


@pytest.mark.parametrize("moving", ["q", "k", "v", "qk", "kv", ""], ids=lambda x: x or "sinks alone")
@pytest.mark.parametrize("D, V", FEATURES)
def test_tangents_of_some_operands(D, V, moving):
    """Products with a tangent that is None are left out: the same as with zeros."""
    case = Case("some", S=0.9, H=4, G=2, D=D, V=V, sinks=1, spec=CAUSAL)
    x, spec, _, tangents, *_ = judged(case, 500, jnp.bfloat16)
    config = space("flash_attention_jvp", x, spec, TARGET)[0]
    absent = set("qkv") - set(moving)
    none = Operands(**{name: None for name in Operands._fields})._replace(**tangents)
    moved = (
        flash_attention_jvp(x, outputs(case, 500, jnp.bfloat16), none._replace(**instead), spec=spec, config=config)
        for instead in (dict.fromkeys(absent), {name: jnp.zeros_like(tangents[name]) for name in absent})
    )
    for name, some, every in zip(Outputs._fields, *moved, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float64) for x in (some, every)), rtol=1e-5, atol=1e-5, err_msg=name
        )
