"""flash_attention in Mosaic GPU, lowered for a Hopper GPU without one: every config of every shape that it takes."""

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._dispatch import select
from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention, supports
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import ATTENTION_SHAPES, Platform, Target

HOPPER = Target("cuda", "NVIDIA H200")
CUSTOM_CALL = "mosaic_gpu_v2"


def call(shape) -> tuple[Operands, FlashAttentionSpec]:
    sizes = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in shape.sizes.items() if name in "qkv"}
    sinks = jax.ShapeDtypeStruct((1, shape.heads, shape.sinks), jnp.float32) if shape.sinks else None
    return Operands(**sizes, sinks=sinks), FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


CALLS = {name: call(shape) for name, shape in ATTENTION_SHAPES.items()}
CONFIGS = [
    pytest.param(name, config, id=f"{name}, {config.block_k}x{config.num_stages}")
    for name, (x, spec) in CALLS.items()
    if supports(spec, x, HOPPER) is None
    for config in space("flash_attention", x, spec, HOPPER)
]


@pytest.mark.parametrize("name, config", CONFIGS)
def test_lowers(name, config):
    x, spec = CALLS[name]
    text = lowered(lambda *x: flash_attention(*x, spec=spec, config=config), *x)
    assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="before 0.12 JAX itself writes no kernel twice the same")
@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "gemma3-12b-local"])
def test_the_text_is_the_same_every_time(name):
    """A compilation cache finds a program by its text."""
    x, spec = CALLS[name]
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    first, again = (lowered(lambda *x: flash_attention(*x, spec=spec, config=config), *x) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("queries, keys", [(64, 64), (77, 300), (1000, 130)])
def test_lengths_that_fill_no_tile(queries, keys):
    x = Operands(*(jax.ShapeDtypeStruct((2, n, 2, 64), jnp.float16) for n in (queries, keys, keys)))
    spec = FlashAttentionSpec(causal=True)
    assert supports(spec, x, HOPPER) is None
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    assert CUSTOM_CALL in lowered(lambda *x: flash_attention(*x, spec=spec, config=config), *x)


def test_the_library_picks_it():
    x, spec = CALLS["llama3-8b"]
    assert select("flash_attention", spec, x, HOPPER).platform == Platform.PALLAS
    assert select("flash_attention", spec, x, Target("cuda", "NVIDIA A100-SXM4-80GB")).platform != Platform.PALLAS
    text = lowered(lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, causal=True), *x[:3])
    assert CUSTOM_CALL in text


q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
REFUSED = {
    "platform": (dict(target=Target("tpu")), "not on tpu"),
    "capability": (dict(target=Target("cuda", "NVIDIA A100-SXM4-80GB")), "capability 9.0, not 8.0"),
    "dtype": (dict(q=jax.ShapeDtypeStruct(q.shape, jnp.float32)), "q is float32"),
    "features": (dict(q=jax.ShapeDtypeStruct((2, 128, 4, 80), q.dtype)), "80 and 64 features"),
    "queries": (dict(q=jax.ShapeDtypeStruct((2, 1, 4, 64), q.dtype)), "1 queries"),
    "bias": (dict(bias=jax.ShapeDtypeStruct((1, 1, 128, 128), q.dtype)), "bias"),
    "negative scale": (dict(spec=FlashAttentionSpec(softmax_scale=-1.0)), "scale of -1"),
    "hidden first keys": (dict(q=jax.ShapeDtypeStruct((2, 64, 4, 64), q.dtype), window=(9, 0)), "first keys"),
    "hidden last keys": (dict(window=(None, -1)), "last keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_it_does_not_take(name):
    changed, reason = REFUSED[name]
    target, spec = changed.pop("target", HOPPER), changed.pop("spec", None)
    spec = spec or FlashAttentionSpec(window=changed.pop("window", (None, None)))
    assert reason in supports(spec, Operands(q, q, q)._replace(**changed), target)
