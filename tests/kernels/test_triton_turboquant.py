"""Attention over pages quantised by TurboQuant in Triton, by the interpreter, against the definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, assert_close

pytest.importorskip("triton")
from ejkernel.kernels._pallas.gpu import ragged_page_attention as mosaic
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch, _turboquant
from ejkernel.kernels._triton._turboquant import prefill
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v2_turboquant import Operands
from ejkernel.types import Target

from . import interpreter
from .against_xla import prepared
from .paged import close
from .quantised_pages import POOLS, defined, step, with_strangers

V2, V3 = "ragged_page_attention_v2_turboquant", "ragged_page_attention_v3_turboquant"
# A prefill of several tiles, decodes, a sequence without tokens, and one with more tokens than keys.
LONG = dict(contexts=(70, 40, 1, 33, 3, 8), lengths=(60, 1, 1, 0, 5, 4), tokens=75)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Launches run here, as for a GPU, but no prefills by Mosaic GPU, which has no interpreter; tiles of prefills are
    so small that the steps have several.
    """
    monkeypatch.setattr(mosaic, "LEAST_TOKENS", 1000)
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    monkeypatch.setattr(_turboquant, "ROWS_OF_WARPGROUP", 16)
    monkeypatch.setitem(_turboquant.SIZES, 16, ((16, 4, 1),))
    with lowering_for(Target("cuda", "NVIDIA H200")):
        yield


def by_triton(operation, x, spec, **config):
    config = OPERATIONS[operation].config_class(**{"keys_per_block": 16, "num_splits": 3, "num_warps": 1} | config)
    return kernel_registry.find(operation, "triton").implementation(*x, spec=spec, config=config)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.operation}-{case.name}", marks=[] if case.name == "mixed" else pytest.mark.slow)
        for case in CASES
        if case.operation in (V2, V3)
    ],
)
def test_cases(case):
    x, spec, _ = prepared(case)
    assert_close(
        by_triton(case.operation, x, spec),
        kernel_registry.find(case.operation, "xla").implementation(*x, spec=spec),
        2e-6,
    )


def operands_of(x, **options):
    """The operands and the spec of a call."""
    call = OPERATIONS[V2].prepare_arguments(**x, **options)
    return OPERATIONS[V2].algorithm.operands(**call.named), call.spec


def check(x, tolerance=1e-6, config=(), **options):
    """o and lse of the operation on a step are those of the definition, whatever stands in what nothing reads."""
    operands, spec = operands_of(with_strangers(x, options.get("window")), **options)
    found = by_triton(V2, operands, spec, **dict(config))
    for one, wanted in zip((found.o[0], found.lse[0]), defined(x, **options), strict=True):
        close(one, wanted, tolerance if one.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("options", (dict(), dict(window=9), dict(softcap=2.0, softmax_scale=-0.3)), ids=str)
def test_options(options, splits):
    check(step(**LONG)[0], config=dict(num_splits=splits), **options)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", ((6,), (6, 3)), ids=str)
def test_sinks(sinks):
    check(step(**LONG, sinks=sinks)[0])


@pytest.mark.parametrize("dtype, norms, bits", (("bfloat16", "bfloat16", 4), ("float16", "float32", 2)))
def test_products_of_16_bits(dtype, norms, bits):
    """In which rows of queries and of weights are scaled: lse has the error of float16."""
    x, _ = step(**LONG, dtype=dtype, norms=norms, bits=bits)
    x["q"] *= jnp.exp2(jnp.arange(75.0) % 20 - 10).astype(dtype)[:, None, None]
    x["value_norms_pages"] = -x["value_norms_pages"]  # which no norm is; a factor of weights may have any sign
    check(x, 2e-3, softmax_scale=1e-3)


@pytest.mark.parametrize("h, g, d, rows", ((1, 1, 4, 8), (16, 1, 20, 40), (40, 2, 32, 8)))
def test_shapes(h, g, d, rows):
    """Features and rows that fill no tile; groups of one head, and of more than a row of tokens holds."""
    check(step(h=h, g=g, d=d, rows=rows, page=4)[0])


# --- Prefills, whose keys are dequantised -----------------------------------------------------------------------------

# Tables of 80 slots, in pages of which a smaller cache has 16.
PREFILLS = dict(contexts=(70, 40, 64, 33, 3, 9), lengths=(60, 1, 30, 0, 2, 12), tokens=110, count=6, page=4, columns=20)


@pytest.fixture
def dequantised(monkeypatch):
    """How many pages each launch has dequantised."""
    found = []

    def launch(kernel, *operands, out_type, **how):
        if kernel.__name__ == "dequantise_kernel":
            found.append(out_type.shape[1])
        return interpreter.launch(kernel, *operands, out_type=out_type, **how)

    monkeypatch.setattr(_launch, "launch", launch)
    return found


def in_python(condition, step, state):
    """A while loop whose launches the interpreter runs."""
    while condition(state):
        state = step(state)
    return state


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("options", (dict(), dict(window=9), dict(softcap=2.0, softmax_scale=-0.3)), ids=str)
def test_prefills(dtype, options, dequantised):
    check(step(**PREFILLS, dtype=dtype, sinks=(6, 2))[0], 2e-3, **options)
    assert dequantised == [6 * 5]


def test_prefills_of_features_that_several_programs_share(dequantised):
    check(step(h=2, g=1, d=136, rows=72, **PREFILLS, dtype="float16")[0], 2e-3)
    assert dequantised


@pytest.mark.parametrize("window", (None, 9))
def test_prefills_that_do_not_fit_together(window, dequantised, monkeypatch):
    """As many sequences as fit, then the next ones; with a window the pages before it take no space."""
    monkeypatch.setattr(prefill, "LEAST_CAPACITY", 0)
    monkeypatch.setattr(prefill.lax, "while_loop", in_python)
    lengths = dict(lengths=(60, 1, 30, 0, 2, 17), contexts=(70, 40, 64, 33, 3, 80))
    check(step(**PREFILLS | lengths, dtype="float16")[0], 2e-3, window=window)
    assert dequantised == ([12] if window else [12, 12])


def test_few_tokens_and_tables_of_odd_slots_are_computed_as_they_are(dequantised):
    check(step(**PREFILLS | dict(lengths=(1, 1, 12, 0, 2, 1), tokens=17), dtype="float16")[0], 2e-3)
    check(step(**PREFILLS | dict(page=3, columns=25), dtype="float16")[0], 2e-3)
    assert not dequantised


def test_keys_of_prefills_beyond_float16(dequantised):
    """Where a key or value of float16 would become infinite it has the largest number: results are none."""
    x, _ = step(**PREFILLS, dtype="float16", norms="float32")
    x["key_norms_pages"] = x["key_norms_pages"].at[..., 0].multiply(1e6)
    x["value_norms_pages"] *= 1e6
    operands, spec = operands_of(x, softmax_scale=1e-6)
    found = by_triton(V2, operands, spec)
    assert dequantised and all(np.isfinite(a[0, :60]).all() for a in found)


@pytest.mark.parametrize("of_step", (dict(), PREFILLS | dict(dtype="float16")), ids=("decodes", "prefills"))
def test_vmap_over_some_operands(of_step):
    """Pools and matrices that are not mapped are not repeated; a mapped codebook is looked up for each index."""
    x, _ = step(**of_step)
    operands, spec = operands_of(x)
    twice = lambda a, b: jnp.concatenate([a, b])
    moved = operands._replace(
        q=twice(operands.q, operands.q[:, ::-1]),
        **{name: twice(a, a) for name in ("context_lens", "block_tables", "query_start_loc", "num_seqs")
           if (a := getattr(operands, name)) is not None},
        value_codebook=twice(operands.value_codebook, 2 * operands.value_codebook),
        key_signs_pages=twice(operands.key_signs_pages, ~operands.key_signs_pages),
    )  # fmt: skip
    found = by_triton(V2, moved, spec)
    for n in range(2):
        alone = {name: getattr(moved, name)[n] for name in ("q", "value_codebook", "key_signs_pages")}
        for one, wanted in zip(found, defined(x | alone), strict=True):
            close(one[n], wanted, 5e-3 if of_step else 1e-6)


def test_new_keys_are_seen_quantised():
    """The third version is the second after writing, and pools are the same as XLA's."""
    x, new = step(**LONG)
    call = OPERATIONS[V3].prepare_arguments(**x, **new)
    operands = OPERATIONS[V3].algorithm.operands(**call.named)
    found = by_triton(V3, operands, call.spec)
    wanted = kernel_registry.find(V3, "xla").implementation(*operands, spec=call.spec)
    jax.tree.map(np.testing.assert_array_equal, found[2:], wanted[2:])
    for one, formula in zip(
        found[:2], defined(x | dict(zip(POOLS, (a[0] for a in found[2:]), strict=True))), strict=True
    ):
        close(one[0], formula)


def refused(**options):
    x, _ = step(**options)
    operands, spec = operands_of(x)
    return kernel_registry.find(V2, "triton").implementation.supports(spec, operands, Target("cuda", "NVIDIA H200"))


def test_what_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(_turboquant, "ROWS_OF_WARPGROUP", 64)
    assert "6 features; the kernel takes multiples of 4" in refused(d=6)
    assert "264 rows; the kernel takes up to 256" in refused(rows=264)
    assert "66 query heads share a key/value head; the kernel takes up to 64" in refused(h=66, g=1, dtype="bfloat16")
    assert "up to 32 of 256 features" in refused(h=33, g=1, d=256, dtype="bfloat16")
    assert "up to 32 of 16 features in float32" in refused(h=33, g=1)
    assert refused() is None


# --- Tables that PTX looks entries up in ------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", (1, 2, 8, 11, 16))
def test_tables(entries):
    """Number n of four bytes has those of entries 4n to 4n + 3: lower ones in the first four numbers."""
    from ejkernel.kernels._triton._turboquant.entries import codebooks_of, tables_of
    from ejkernel.xla_utils.turboquant import Matrices

    books = np.random.default_rng(entries).standard_normal((2, entries)).astype(np.float32) * 1e-3
    both = Matrices(None, None, jnp.asarray(books[:1]), jnp.asarray(books[1:]))
    *words, unit = np.moveaxis(np.asarray(tables_of(codebooks_of(both))), -1, 0)
    low, high = (np.stack(x, -1)[..., None] >> np.arange(0, 32, 8) & 0xFF for x in (words[:4], words[4:]))
    found = (low + 256 * high).astype(np.uint16).view(np.float16).reshape(1, 2, 16)
    found = found.astype(np.float64) * unit.view(np.float32)[..., None]
    np.testing.assert_allclose(found[0, :, :entries], books, rtol=2**-11, atol=2**-24 * np.abs(books).max())
    np.testing.assert_array_equal(found[..., entries:], np.repeat(found[..., entries - 1 : entries], 16 - entries, -1))


# --- Tiles and splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, chosen",
    {
        (32, 16384): (16, 8),
        (64, 1024): (16, 4),
        (300, 512): (16, 1),
        (1, 1024): (16, 8),
        (1, 65536): (64, 128),
        (16, 1024): (64, 8),
    }.items(),
    ids=str,
)
def test_the_likeliest_config_fills_the_gpu(step, chosen):
    """Tiles of 16 keys if as many programs as they allow are resident; a split has 128 keys at least."""
    sequences, context = step
    of = lambda *shape, dtype="int32": jax.ShapeDtypeStruct((1, *shape), dtype)
    x = Operands(**dict.fromkeys(Operands._fields))._replace(
        q=of(sequences, 32, 128, dtype="bfloat16"),
        value_norms_pages=of(512, 64, 8, dtype="bfloat16"),
        qjl_projection=of(128, 128, dtype="float32"),
        block_tables=of(sequences, context // 64),
    )
    first = _turboquant.space(CacheSpec(), x, Target("cuda", "NVIDIA H200"))[0]
    assert (first.keys_per_block, first.num_splits) == chosen
