"""The TPU kernels of flash_attention pass the real TPU compiler, for every generation, within its memories.

A program is determined by the features, options and blocks of a call, not by how many heads or sequences there are: of
the named shapes that share one, the first stands for all. What the compiler takes to do is minutes in all, so that a
normal run has the heuristics' choice for one shape on each generation, and a few calls with the rarer operands.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel
from ejkernel.kernels._pallas.tpu.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.kernels._pallas.tpu.flash_attention.launch import VMEM_BYTES
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import ATTENTION_SHAPES, AttentionShape, KernelConfig
from tests.gpu.attention_cases import CASES, differentiable

from .tpu_compiler import TARGETS, compiled, device

pytest.importorskip("libtpu")

IMPLEMENTATIONS = {f.__name__: f for f in (flash_attention, flash_attention_bwd, flash_attention_jvp)}
# What a normal run compiles: shapes with the heuristics' configs, and calls of the list of cases.
QUICK_SHAPES = {
    ("v5e", "flash_attention", "gemma3-27b-local"),
    ("v5e", "flash_attention_bwd", "gpt-oss-local"),
    ("v5p", "flash_attention_jvp", "llama3-8b"),
    ("v5p", "flash_attention", "gpt-oss"),
    ("v6e", "flash_attention", "llama3-8b"),
    ("v6e", "flash_attention_bwd", "bert-large"),
    ("tpu7x", "flash_attention_bwd", "gemma2-9b-local"),
    ("tpu7x", "flash_attention_jvp", "vit-large"),
}
QUICK_CASES = {
    ("v5e", "bias of pairs, capped", "float32"),
    ("v5p", "segments, causal, bias", "bfloat16"),
    ("v6e", "packed, window, sinks", "bfloat16"),
    ("tpu7x", "mask of keys, causal", "bfloat16"),
}


def call_of(shape: AttentionShape, dtype=jnp.bfloat16) -> tuple[Operands, FlashAttentionSpec]:
    sizes = shape.sizes
    q, k, v = (jax.ShapeDtypeStruct(sizes[name], dtype) for name in "qkv")
    sinks = jax.ShapeDtypeStruct((1, *sizes["sinks"]), jnp.float32) if shape.sinks else None
    return Operands(q, k, v, sinks=sinks), FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)


def run(operation: str, spec: FlashAttentionSpec, config: KernelConfig):
    """The operation as a function of operands and outputs, which also stand for tangents and cotangents."""
    if operation == "flash_attention":
        return lambda x, out: flash_attention(*x, spec=spec, config=config)
    if operation == "flash_attention_jvp":
        return lambda x, out: flash_attention_jvp(x, out, moving(x), spec=spec, config=config)
    return lambda x, out: flash_attention_bwd(x, out, out, wrt=differentiable(x), spec=spec, config=config)


def moving(x: Operands) -> Operands:
    return x._replace(**{name: None for name in x._fields if name not in differentiable(x)})


def distinct_calls():
    """(generation, operation, shape, config) of all spaces, one for each distinct program."""
    calls = {}
    for generation, target in TARGETS.items():
        for shape in ATTENTION_SHAPES.values():
            x, spec = call_of(shape)
            for operation, implementation in IMPLEMENTATIONS.items():
                for n, config in enumerate(implementation.space(spec, x, target)):
                    options = (shape.head_dim, shape.value_dim, shape.sinks, shape.softcap, shape.causal, shape.window)
                    call = (generation, operation, shape, config, n == 0)
                    calls.setdefault((generation, operation, options, config), call)
    return calls.values()


def parameter(generation: str, operation: str, shape: AttentionShape, config: KernelConfig, is_first: bool):
    quick = is_first and (generation, operation, shape.name) in QUICK_SHAPES
    name = f"{generation}-{operation}-{shape.name}-{config.block_q}x{config.block_k}x{config.num_stages}"
    return pytest.param(generation, operation, shape, config, marks=() if quick else pytest.mark.slow, id=name)


@pytest.mark.parametrize("generation, operation, shape, config", [parameter(*call) for call in distinct_calls()])
def test_named_shapes(generation, operation, shape, config):
    """Every config of the space of every named shape."""
    x, spec = call_of(shape)
    out = jax.eval_shape(lambda *x: flash_attention(*x, spec=spec, config=config), *x)
    assert "tpu_custom_call" in compiled(run(operation, spec, config), generation, x, out).as_text()


@pytest.mark.parametrize(
    "generation, case, dtype",
    [
        pytest.param(
            generation,
            case,
            dtype,
            marks=() if (generation, case.name, dtype) in QUICK_CASES else pytest.mark.slow,
            id=f"{generation}-{case.name}-{dtype}",
        )
        for generation in TARGETS
        for case in CASES
        for dtype in ("bfloat16", "float32")
        if not case.spec.dropout_rate
    ],
)
def test_operands_and_options(generation, case, dtype):
    """Forward, backward and tangent with all that a call may have, by the heuristics' configs."""
    x, spec = case.make(300, jnp.dtype(dtype))
    x = jax.eval_shape(lambda: x)
    configs = {name: f.heuristic(spec, x, TARGETS[generation]) for name, f in IMPLEMENTATIONS.items()}
    out = jax.eval_shape(lambda *x: flash_attention(*x, spec=spec, config=configs["flash_attention"]), *x)
    all_three = lambda x, out: [run(name, spec, config)(x, out) for name, config in configs.items()]
    assert compiled(all_three, generation, x, out).as_text().count("tpu_custom_call") >= 3


@pytest.mark.parametrize("generation", TARGETS)
def test_memory_of_a_core(generation):
    """No kernel may take more than the smallest vector memory, whatever is known of the target."""
    core = device(generation)
    assert core.device_kind == TARGETS[generation].device_kind
    abstract = jax.sharding.AbstractDevice(device_kind=core.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
        assert pltpu.get_tpu_info().vmem_capacity_bytes > VMEM_BYTES


@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        ("float16", {}, "float16"),
        ("bfloat16", dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "dropout"),
        ("bfloat16", {}, "features"),
    ],
)
def test_what_the_kernels_refuse_compiles_all_the_same(dtype, options, reason):
    """The reason is given, and XLA's implementation takes the call."""
    features = 264 if reason == "features" else 64
    q = jax.ShapeDtypeStruct((1, 256, 2, features), jnp.dtype(dtype))
    attend = lambda q: ejkernel.lax.flash_attention(q, q, q, **options)
    said = str(ejkernel.explain("flash_attention", q, q, q, target=TARGETS["v6e"], **options))
    assert reason in said
    assert "tpu_custom_call" not in compiled(attend, "v6e", q).as_text()
