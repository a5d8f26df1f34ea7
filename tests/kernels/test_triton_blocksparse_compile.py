"""blocksparse_attention in Triton compiles for every GPU, without one: little is spilled, and programs fit.

Tests that take a core of CI about a minute always run; the rest are slow tests.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch, blocksparse_attention
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.blocksparse_attention.configs import space
from ejkernel.primitives.blocksparse_attention import blocksparse_attention as algorithm
from ejkernel.primitives.flash_attention import Outputs
from tests.gpu.blocksparse_cases import sparse, sparse_spec

from . import compiler
from .test_triton_compile import KINDS
from .test_triton_spills import ATTENTION, HALF, LARGE, LIMIT, SINGLE, SMALL, WIDTHS, Call

OPERATIONS = ("blocksparse_attention", "blocksparse_attention_bwd", "blocksparse_attention_jvp")
BLOCKS = {"128": (128, 128), "64": (64, 64), "16": (16, 16), "128x32": (128, 32)}
ALWAYS = (
    ("sm_80", OPERATIONS[0], "plain", "128", "bfloat16", "128"),
    ("sm_90", OPERATIONS[0], "plain", "128", "bfloat16", "128"),
    ("sm_90", OPERATIONS[1], "plain", "128", "bfloat16", "128"),
    ("sm_90", OPERATIONS[2], "plain", "128", "bfloat16", "128"),
    ("sm_90", OPERATIONS[1], "packed", "64", "bfloat16", "64"),
    ("sm_100", OPERATIONS[1], "plain", "128", "bfloat16", "128"),
    ("sm_120", OPERATIONS[1], "edges", "64", "bfloat16", "128x32"),
)


def call_of(kind: str, width: str, dtype: str, blocks: str):
    """Operands and spec; the block mask differs between heads."""
    D, V = WIDTHS[width]
    call, size = Call(D=D, V=V, dtype=dtype, **ATTENTION[kind]), BLOCKS[blocks]
    numbers = tuple(-(-n // of) for n, of in zip((call.S, call.K), size, strict=True))
    mask = jax.ShapeDtypeStruct((1, call.H, *numbers), "bool")
    x = sparse(call.operands, mask)
    return (x._replace(dropout=None) if x.cu_seqlens_q is not None else x), sparse_spec(call.spec, size)


def implementation(operation: str, x, spec, config):
    """The operation on zeros, in all directions, to be traced."""
    moving = x._replace(**{name: None for name in x._fields if name not in algorithm.differentiable})
    shape = x.q.shape[:3]
    outputs = Outputs(jnp.zeros((*shape, x.v.shape[3]), x.q.dtype), jnp.zeros((shape[0], shape[2], shape[1])))
    x, moving = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (x, moving))
    run = partial(getattr(blocksparse_attention, operation), spec=spec, config=config)
    if operation.endswith("_jvp"):
        return run(x, outputs, moving)
    if operation.endswith("_bwd"):
        return run(x, outputs, outputs, wrt=tuple(n for n in algorithm.differentiable if getattr(x, n) is not None))
    return run(*x)


CASES = dict.fromkeys(
    (
        *product(LARGE + SMALL, OPERATIONS, ATTENTION, WIDTHS, HALF, ("128",)),
        *product(LARGE + SMALL, OPERATIONS, ("plain", "packed", "edges"), ("64", "128"), HALF, BLOCKS),
        *product(LARGE + SMALL, OPERATIONS, ("plain", "all"), ("64", "128", "256"), SINGLE, ("128",)),
    )
)


@pytest.mark.parametrize(
    "target, operation, kind, width, dtype, blocks",
    [pytest.param(*case, id="-".join(case), marks=[] if case in ALWAYS else pytest.mark.slow) for case in CASES],
)
def test_compiles(target, operation, kind, width, dtype, blocks, monkeypatch):
    """With the heuristic config it fits, hardly spills, and its matrix products overlap."""
    x, spec = call_of(kind, width, dtype, blocks)
    if reason := getattr(blocksparse_attention, operation).supports(spec, x, KINDS[target]):
        pytest.skip(reason)
    config, trouble = space(operation, x, spec, KINDS[target])[0], []
    with lowering_for(KINDS[target]):
        launches = compiler.launches(monkeypatch, _launch, partial(implementation, operation, x, spec, config))
    assert launches
    for launch in launches:
        binary = compiler.binary(launch, compiler.TARGETS[target])
        if binary.spilled > LIMIT or binary.serialized or binary.shared > shared_memory_limit(KINDS[target]):
            trouble.append(f"{launch}: {binary}")
    assert not trouble, "\n".join(trouble)
