"""blocksparse_attention on TPU: results in the interpreter that simulates the chip, and compilation."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.tpu.blocksparse_attention import (
    blocksparse_attention,
    blocksparse_attention_bwd,
    blocksparse_attention_jvp,
)
from ejkernel.kernels._xla._blocks import within_blocks
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import check_near, differentiable, like
from tests.gpu.blocksparse_cases import SPARSE_CASES, poisoned_cotangents_in_blocks, poisoned_in_blocks

from .tpu_compiler import TARGETS, compiled
from .tpu_interpreter import interpreted

LENGTH = 200
CONFIG = KernelConfig(block_q=128, block_k=256)
SPLIT = replace(CONFIG, algorithm="split")
# Blocks have as many lanes as the tiles of Triton's interpreter have rows and columns.
CASES = [
    replace(case, size=tuple(8 * n for n in case.size)) for case in SPARSE_CASES if not case.flash.spec.dropout_rate
]
ALWAYS = {
    "together": ("causal, blocks of 128x128 b", "sinks, blocks of 128x128 bh", "segments, blocks of 128x128 h"),
    "split": ("grouped heads, blocks of 128x256 bh", "packed, causal, blocks of 128x256 b"),
}
COMPILED = {("v5e", "grouped heads, blocks of 128x256 bh"), ("v5p", "segments, blocks of 128x128 h"),
            ("v6e", "grouped heads, blocks of 128x128"), ("tpu7x", "sinks, blocks of 128x128 bh")}  # fmt: skip
IMPLEMENTATIONS = blocksparse_attention, blocksparse_attention_bwd, blocksparse_attention_jvp


def slow_unless(quick: bool):
    return () if quick else pytest.mark.slow


@pytest.mark.parametrize(
    "case, dtype, config",
    [
        pytest.param(
            case, dtype, config, id=f"{case.name}-{dtype}-{name}", marks=slow_unless(case.name in ALWAYS[name])
        )
        for case in CASES
        for dtype, name, config in (("float32", "together", CONFIG), ("bfloat16", "split", SPLIT))
    ],
)
def test_in_the_interpreter(case, dtype, config):
    """Forward, backward and tangent, with NaN in masked entries of kept blocks."""
    x, spec = case.make(LENGTH, jnp.dtype(dtype))
    wrt = differentiable(x)
    if reason := blocksparse_attention_bwd.supports(spec, x, TARGETS["v5e"]):
        pytest.skip(reason)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})

    @interpreted
    def run(x, tangents, cotangents):
        outputs = blocksparse_attention(*x, spec=spec, config=config)
        gradients = blocksparse_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=config)
        moved = blocksparse_attention_jvp(x, outputs, tangents, spec=spec, config=config)
        return outputs, dict(zip(wrt, gradients, strict=True)), moved

    cotangents = like(jax.eval_shape(functools.partial(blocksparse_attention, spec=spec, config=config), *x), 2)
    poisoned = poisoned_in_blocks(x, spec, tangents), poisoned_cotangents_in_blocks(cotangents, x, spec)
    results = run(poisoned_in_blocks(x, spec), *poisoned)
    check_near(results, within_blocks(x, spec), spec, cotangents, tangents.attention._asdict(), jnp.dtype(dtype))


# --- The compiler


@pytest.mark.parametrize(
    "generation, case, dtype",
    [
        pytest.param(
            generation,
            case,
            dtype,
            id=f"{generation}-{case.name}-{dtype}",
            marks=slow_unless(dtype == "bfloat16" and (generation, case.name) in COMPILED),
        )
        for generation in TARGETS
        for case in CASES
        for dtype in ("bfloat16", "float32")
    ],
)
def test_compiles(generation, case, dtype):
    """Forward, backward and tangent, by the heuristics' configs."""
    pytest.importorskip("libtpu")
    x, spec = case.make(1100, jnp.dtype(dtype))
    compile_all(generation, jax.eval_shape(lambda: x), spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "generation, leading",
    [
        pytest.param(generation, leading, marks=slow_unless((generation, leading) == ("v6e", (1, 16))))
        for generation in TARGETS
        for leading in ((1, 1), (1, 16))
    ],
)
def test_a_causal_layer_compiles(generation, leading):
    """With 16,384 tokens and blocks of 128, whose tables fit into scalar memory, even if they differ between heads."""
    pytest.importorskip("libtpu")
    q = jax.ShapeDtypeStruct((1, 16384, 16, 128), jnp.bfloat16)
    x = Operands(q, q, q, jax.ShapeDtypeStruct((*leading, 128, 128), jnp.bool_))
    compile_all(generation, x, BlocksparseAttentionSpec(causal=True, softmax_scale=128**-0.5))


def compile_all(generation, x, spec):
    for implementation in IMPLEMENTATIONS:
        target = TARGETS[generation]
        if implementation.supports(spec, x, target):
            assert implementation is blocksparse_attention_bwd and x.sinks is not None
            continue
        run = functools.partial(implementation, spec=spec, config=implementation.heuristic(spec, x, target))
        outputs = jax.eval_shape(functools.partial(blocksparse_attention, spec=spec, config=CONFIG), *x)
        wrt = tuple(name for name in differentiable(x))
        tangents = x._replace(**{name: None for name in x._fields if name not in wrt})
        function, arguments = {
            "blocksparse_attention": (lambda x, run=run: run(*x), (x,)),
            "blocksparse_attention_jvp": (run, (x, outputs, tangents)),
            "blocksparse_attention_bwd": (functools.partial(run, wrt=wrt), (x, outputs, outputs)),
        }[implementation.__name__]
        assert "tpu_custom_call" in compiled(function, generation, *arguments).as_text()
