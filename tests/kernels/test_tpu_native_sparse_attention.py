"""native_sparse_attention on TPU: numbers in the interpreter that simulates the chip, and the real TPU compiler.

The shapes that are compiled are those of the paper's 27B model, 64 query heads and 4 key/value heads with 16 blocks of
64 keys, and of models unlike it; a normal run has a short one of them.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, FAMILIES

from ejkernel.kernels._pallas.tpu.native_sparse_attention import problem as layout
from ejkernel.kernels._pallas.tpu.native_sparse_attention import records
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla.native_sparse_attention import reference
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target

from . import against_xla
from .paged import wide
from .tpu_compiler import TARGETS, compiled
from .tpu_interpreter import interpreted

NAME = "native_sparse_attention"
GIVEN = [case for case in CASES if case.operation == NAME and "block_indices" in case.operands]
KINDS = ("", "_bwd", "_jvp")
TPU, XLA = (
    {kind: kernel_registry.find(NAME + kind, *of).implementation for kind in KINDS}
    for of in (("pallas", "tpu"), ("xla",))
)
SMALL = KernelConfig(block_q=128, block_k=16)
TARGET = Target("tpu", "TPU v6 lite")
slow = pytest.mark.slow


def check(case, config=SMALL):
    """Forward, backward and tangent against those in plain JAX."""
    call = against_xla.prepared(case)
    assert all(of.supports(call[1], call[0], TARGET) is None for of in TPU.values())
    against_xla.check(case, call, "pallas", "tpu", config, run=interpreted)


@pytest.mark.parametrize("case", [GIVEN[0], pytest.param(GIVEN[1], marks=slow)], ids=str)
def test_lists(case):
    check(case.resized(dict(b=1)))


@slow
@pytest.mark.parametrize(
    "sizes, block, config",
    [
        pytest.param(dict(b=2, s=70, t=90, h=6, g=2, d=24, e=40, n=3), 20, SMALL, id="several tiles"),
        pytest.param(dict(b=1, s=9, t=40, h=32, g=1, n=4), 8, KernelConfig(block_q=256, block_k=24), id="wide group"),
        pytest.param(dict(b=1, s=140, t=140, h=1, g=1, n=2), 16, SMALL, id="one head"),
        pytest.param(dict(b=1, s=1, t=50, h=4, g=2, n=3), 16, SMALL, id="one query"),
    ],
)
def test_shapes(sizes, block, config):
    check(replace(GIVEN[0].resized(sizes), options=dict(block_size=block)), config)


@slow
def test_lists_of_several_records(monkeypatch):
    """Of two entries each: the lists of a tile, and of a slot, are many records, the last of them partly filled."""
    for module in ("forward", "backward"):
        monkeypatch.setattr(f"ejkernel.kernels._pallas.tpu.native_sparse_attention.{module}.entries_of", lambda *_: 2)
    case = GIVEN[0].resized(dict(b=1, s=100, t=100, h=2, g=2, n=4))
    check(replace(case, options=dict(block_size=8)))


def distance(x, exact):
    return np.linalg.norm(wide(x) - wide(exact))


@slow
@pytest.mark.parametrize("name", ("normal", "large_logits", "one_hot_peaks", "long_uniform_rows"))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_families(name, dtype):
    """Against float64: twice the error of the formula in the same dtype, three times for the gradient."""
    case = next(case for case in FAMILIES if case.operation == NAME and case.name == name)
    x, spec, tangents = against_xla.prepared(case.resized(dict(b=1)), dtype)
    cotangents = jax.tree.map(lambda a: against_xla._like(a, 2), XLA[""](*x, spec=spec))
    given = tuple(x[:3]), tuple(tangents[:3]), cotangents

    def of_formula(x_, moving, cotangents):
        f = lambda *of: reference(*of, x.block_indices, spec=spec)
        outputs, pull = jax.vjp(f, *x_)
        return outputs, pull(cotangents), jax.jvp(f, x_, moving)[1]

    def of_kernels(x_, moving, cotangents):
        run = {kind: partial(of, spec=spec, config=SMALL) for kind, of in TPU.items()}
        primals = Operands(*x_, x.block_indices)
        outputs = run[""](*primals)
        gradients = run["_bwd"](primals, outputs, cotangents, wrt=("q", "k", "v"))
        return (
            outputs,
            gradients,
            run["_jvp"](primals, outputs, tangents._replace(q=moving[0], k=moving[1], v=moving[2])),
        )

    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), given)
        exact = jax.tree.map(np.asarray, of_formula(*double))
    for bar, *of in zip((2, 3, 2), exact, of_formula(*given), interpreted(of_kernels)(*given), strict=True):
        for wanted, formula, ours in zip(*of, strict=True):
            allowed = max(distance(formula, wanted), distance(jnp.asarray(wanted).astype(ours.dtype), wanted))
            rounding = 1e-7 * np.linalg.norm(wanted)  # of float32, the dtype of lse for all dtypes
            assert distance(ours, wanted) <= bar * allowed + rounding, (distance(ours, wanted), allowed)


@slow
def test_invisible_entries_affect_no_result():
    """Keys after all queries or in no list, and queries that see no key, hold NaN."""
    case = replace(GIVEN[0].resized(dict(b=1, s=40, t=40, n=2)), options=dict(block_size=8))
    x, spec, tangents = against_xla.prepared(case)
    lists = np.full((1, 40, 2, 2), -1, np.int32)
    lists[:, 4:, :, 0], lists[:, 30:, :, 1] = (
        0,
        3,
    )  # the first four see no key; block 3 is seen as a whole, 1, 2 and 4 by none
    x = x._replace(block_indices=jnp.asarray(lists))
    seen = jnp.isin(jnp.arange(40) // 8, jnp.array([0, 3]))[None, :, None, None]
    sees = (jnp.arange(40) >= 4)[None, :, None, None]
    nan = lambda a, mask: jnp.where(mask, a, jnp.nan)
    with_nan = lambda x: x._replace(q=nan(x.q, sees), k=nan(x.k, seen), v=nan(x.v, seen))
    outputs = XLA[""](*x, spec=spec)
    do = jax.tree.map(lambda a: against_xla._like(a, 2), outputs)

    def derivatives(x, do, tangents):
        outputs = TPU[""](*x, spec=spec, config=SMALL)
        gradients = TPU["_bwd"](x, outputs, do, wrt=("q", "k", "v"), spec=spec, config=SMALL)
        return outputs, gradients, TPU["_jvp"](x, outputs, tangents, spec=spec, config=SMALL)

    run = interpreted(derivatives)
    wanted = run(x, do, tangents)
    do_with_nan = do._replace(o=nan(do.o, sees), lse=nan(do.lse, sees[..., 0].swapaxes(1, 2)))
    jax.tree.map(np.testing.assert_array_equal, run(with_nan(x), do_with_nan, with_nan(tangents)), wanted)
    assert (wanted[0].o[:, :4] == 0).all() and (wanted[0].lse[..., :4] == -jnp.inf).all()
    for name, gradient in zip("qkv", wanted[1], strict=True):
        assert (jnp.where(sees if name == "q" else seen, 0, gradient) == 0).all()


def test_records():
    """Lists of no, one and several records; every entry is in one record, records of a list are adjacent."""
    first, count = jnp.array([0, 0, 5, 8]), jnp.array([0, 5, 2, 1])
    field = jnp.arange(10, 20, dtype=jnp.int32)
    found = records.records_of(first, count, [field] * 4, 2, 4 + 8 // 2)
    assert found.count == 6
    words = np.asarray(found.table[:6])
    np.testing.assert_array_equal(words >> records.COUNT_BITS, [0, 1, 1, 1, 2, 3])
    np.testing.assert_array_equal(words & 127, [0, 2, 2, 1, 2, 1])
    np.testing.assert_array_equal(found.entries[:6, 0, :2], [[0, 0], [10, 11], [12, 13], [14, 0], [15, 16], [18, 0]])


def test_arrays_by_tiles_and_by_slots():
    """And back: packed tokens are in the slots of their sequences."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    lists = jnp.zeros((1, 50, 2, 1), jnp.int32)
    for cuts in (None, jnp.array([[0, 7, 7, 29, 45]])):
        x = Operands(array(1, 50, 6, 8), array(1, 50, 2, 8), array(1, 50, 2, 8), lists, cuts)
        problem = layout.problem_of(x, NativeSparseAttentionSpec(block_size=6), SMALL)
        tiles, slots = layout.in_tiles(x.q, problem), layout.in_slots(x.k, x, problem)
        assert tiles.shape[1:] == (128, 8) and slots.shape[1:] == (8, 8)
        np.testing.assert_array_equal(layout.out_of_tiles(tiles, problem), x.q)
        inside = (jnp.arange(50) < (50 if cuts is None else 45))[:, None, None]
        np.testing.assert_array_equal(layout.out_of_slots(slots, x, problem)[0], jnp.where(inside, x.k[0], 0))


# --- What is refused, and what it compiles to -------------------------------------------------------------------------

array = jax.ShapeDtypeStruct


def shapes(b=1, s=16384, h=64, g=4, d=128, e=128, n=16, size=64, dtype="bfloat16", sequences=None):
    """Operands, spec and outputs of a call."""
    cuts = None if sequences is None else array((1, sequences + 1), "int32")
    x = array((b, s, h, d), dtype), array((b, s, g, d), dtype), array((b, s, g, e), dtype), array((b, s, g, n), "int32")
    outputs = Outputs(array((b, s, h, e), dtype), array((b, h, s), "float32"))
    return Operands(*x, cuts), NativeSparseAttentionSpec(size, d**-0.5), outputs


@pytest.mark.parametrize(
    "sizes, reason",
    [
        (dict(dtype="float16"), "float16"),
        (dict(d=264), "q has 264 features"),
        (dict(h=1024), "256 query heads"),
        (dict(size=2048), "blocks of 2048 keys"),
        (dict(s=0), "an empty batch"),
        (dict(s=2**20, g=64), "scalar memory"),
    ],
    ids=str,
)
def test_what_is_refused(sizes, reason):
    """With the reason, so that XLA takes the call."""
    x, spec, _ = shapes(**sizes)
    assert all(reason in of.supports(spec, x, TARGET) for of in TPU.values())


def test_a_config_that_no_kernel_is_made_for():
    x, spec, _ = shapes(s=64)
    with pytest.raises(ValueError, match=r"config\.block_q is 64"):
        jax.eval_shape(lambda x: TPU[""](*x, spec=spec, config=KernelConfig(block_q=64)), x)


def program(generation, kind, x, spec, outputs, config):
    """The compiled text of a kernel."""
    run = partial(TPU[kind], spec=spec, config=config)
    if kind == "":
        return compiled(lambda x: run(*x), generation, x)
    if kind == "_bwd":
        return compiled(lambda x, out, do: run(x, out, do, wrt=("q", "k", "v")), generation, x, outputs, outputs)
    return compiled(run, generation, x, outputs, x._replace(block_indices=None, cu_seqlens=None))


CALLS = {
    "short": dict(s=512, h=16, g=1, n=4),
    "paper": dict(),
    "64k": dict(s=65536),
    "packed": dict(s=4096, sequences=7),
    "float32": dict(s=2048, dtype="float32"),
    "256 features": dict(s=2048, d=256, e=256),
    "uneven": dict(s=1000, h=6, g=2, d=40, e=24, n=3, size=20),
    "small blocks": dict(s=2048, h=8, g=8, size=16),
    "large blocks": dict(s=2048, h=128, g=1, size=128),
}
QUICK = {("v5e", "_bwd"), ("v5p", ""), ("v6e", "_jvp")}


@pytest.mark.parametrize(
    "generation, kind, name",
    [
        pytest.param(generation, kind, name, marks=() if name == "short" and (generation, kind) in QUICK else slow)
        for generation in TARGETS
        for kind in KINDS
        for name in CALLS
    ],
)
def test_compiles(request, generation, kind, name):
    """Every config of the space (in a normal run the likeliest)."""
    pytest.importorskip("libtpu")
    x, spec, outputs = shapes(**CALLS[name])
    assert TPU[kind].supports(spec, x, TARGETS[generation]) is None
    space = TPU[kind].space(spec, x, TARGETS[generation])
    for config in space if request.node.get_closest_marker("slow") else space[:1]:
        assert "tpu_custom_call" in program(generation, kind, x, spec, outputs, config).as_text()
