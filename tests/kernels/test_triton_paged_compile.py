"""The kernels over a cache in Triton compile for every way of merging the splits of a row, without a GPU.

Few splits are merged by the last program of their row; more, and those of a fixed size, by a launch of their own; a
plan determines the number of splits of a row.
"""

from functools import partial

import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch, _paged
from ejkernel.kernels._triton import ragged_page_attention as ragged
from ejkernel.kernels._triton._paged.launch import MOST_MERGED_AT_ONCE
from ejkernel.kernels._triton.flash_decoding import flash_attention
from ejkernel.kernels._triton.page_attention import page_attention
from ejkernel.kernels._triton.ragged_decode_attention import ragged_decode_attention
from ejkernel.kernels._triton.ragged_page_attention import ragged_page_attention
from ejkernel.kernels._triton.ragged_page_attention_v3 import ragged_page_attention_v3
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives import ragged_page_attention as over_pages
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.flash_attention import FlashAttentionSpec

from . import compiler
from .test_triton_compile import KINDS

N, PAGES, PAGE, COLUMNS, D = 4, 64, 64, 64, 64
POOL = dict(context_lens=(1, N), block_tables=(1, N, COLUMNS))
STEP = POOL | dict(query_start_loc=(1, N + 1), num_seqs=(1, 1), kv_pages=(1, PAGES, PAGE, 2, 2, D))
SHAPES = {
    "page_attention": POOL | dict(q=(1, N, 8, D), **dict.fromkeys(("k_pages", "v_pages"), (1, PAGES, PAGE, 2, D))),
    "ragged_page_attention": STEP | dict(q=(1, 8, 8, D)),
    "ragged_page_attention_v3": STEP | dict(q=(1, 8, 8, D), **dict.fromkeys(("k", "v"), (1, 8, 2, D))),
    "ragged_decode_attention": dict(q=(N, 8, D), **dict.fromkeys(("k", "v"), (N, COLUMNS * PAGE, 2, D)))
    | dict.fromkeys(("sequence_start", "sequence_end"), (N,)),
    "flash_attention": dict(q=(1, 1, 8, D), **dict.fromkeys(("k", "v"), (1, COLUMNS * PAGE, 2, D))),
}
DTYPES = dict.fromkeys(("q", "k", "v", "k_pages", "v_pages", "kv_pages"), "bfloat16") | {"draft_mask": "bool"}
IMPLEMENTATIONS = {
    of.__name__: of
    for of in (
        page_attention,
        ragged_page_attention,
        ragged_page_attention_v3,
        ragged_decode_attention,
        flash_attention,
    )
}
PLAN, DRAFTS, PREFILLS = dict(plan=(1, N, 8, 8)), dict(draft_mask=(1, 8, 4)), dict(q=(1, 512, 8, D))
# The arguments, the shapes that differ from those above, and whether a launch of its own merges the splits.
CASES = {
    "one split": (dict(num_splits=1), {}, False),
    "few splits": (dict(num_splits=MOST_MERGED_AT_ONCE), {}, False),
    "many splits": (dict(num_splits=17), {}, True),
    "batch invariant": (dict(batch_invariant=True), {}, True),
    "plan": (dict(num_splits=3), PLAN, False),
    "many splits with drafts": (dict(num_splits=17), DRAFTS, True),
    "plan with drafts": (dict(num_splits=3), DRAFTS | PLAN, False),
    "many splits beside prefills": (dict(num_splits=17), PREFILLS, True),
}
# flash_attention, whose kernel of few queries takes as many splits as fill the GPU, and the other operations.
OF_ALL, OF_A_STEP = ("one split", "few splits", "many splits", "batch invariant"), tuple(CASES)
NAMES = {
    "page_attention": (*OF_ALL, "plan"),
    "ragged_page_attention": OF_A_STEP,
    "ragged_page_attention_v3": OF_ALL,
    "ragged_decode_attention": OF_ALL,
    "flash_attention": ("many splits", "batch invariant"),
}
ALWAYS = [(operation, "many splits") for operation in ("page_attention", "ragged_page_attention", "flash_attention")]


@pytest.mark.parametrize(
    "operation, name",
    [
        pytest.param(operation, name, marks=() if (operation, name) in ALWAYS else pytest.mark.slow)
        for operation, names in NAMES.items()
        for name in names
    ],
)
def test_compiles(operation, name, monkeypatch):
    """All launches of a call, for a Hopper."""
    options, shapes, merged = CASES[name]
    implementation, algorithm = IMPLEMENTATIONS[operation], OPERATIONS[operation].algorithm
    arrays = {n: jnp.zeros(shape, DTYPES.get(n, "int32")) for n, shape in (SHAPES[operation] | shapes).items()}
    x, target = algorithm.operands(**arrays), KINDS["sm_90"]
    spec = CacheSpec(softmax_scale=0.1, **options)
    if operation == "flash_attention":
        spec = FlashAttentionSpec(softmax_scale=0.1, batch_invariant=spec.batch_invariant)
    with lowering_for(target):
        call = partial(implementation, *x, spec=spec, config=implementation.space(spec, x, target)[0])
        found = compiler.launches(monkeypatch, _launch, call)
    assert ("merge_kernel" in [launch.kernel.__name__ for launch in found]) == merged
    for launch in found:
        assert compiler.binary(launch, compiler.TARGETS["sm_90"]).shared <= _launch.shared_memory_limit(target)


@pytest.mark.parametrize("beside", ("a prefill", "a prefill of another platform", "decodes alone"))
@pytest.mark.parametrize(
    "d, page, pool",
    [
        (256, 64, 1),
        (128, 64, PAGES),
        *(
            pytest.param(d, page, pool, marks=pytest.mark.slow)
            for d in (16, 24, 64, 96, 128, 192, 256)
            for page in (1, 8, 16, 32, 64, 128, 256)
            for pool in (1, PAGES)
        ),
    ],
)
def test_decodes_fit_shared_memory(d, page, pool, beside, monkeypatch):
    """With a pool of one page no launch waits for page numbers, and more stages hold keys."""
    given = lambda x: (dict(o=jnp.zeros(x.q.shape, x.q.dtype), lse=jnp.zeros(x.q.shape[:3])), jnp.zeros(1, jnp.int32))
    tokens = N if beside == "decodes alone" else 512
    sizes = STEP | dict(q=(1, tokens, 8, d), kv_pages=(1, pool, page, 2, 2, d))
    x = over_pages.Operands(**{n: jnp.zeros(shape, DTYPES.get(n, "int32")) for n, shape in sizes.items()})
    spec, target, checked = CacheSpec(softmax_scale=0.1), KINDS["sm_90"], 0
    prefill = (lambda most: given(x)) if beside == "a prefill of another platform" else None
    with lowering_for(target):
        for config in ragged.space(spec, x, target)[:2]:
            found = compiler.launches(monkeypatch, _launch, partial(ragged.attended, x, spec, config, prefill))
            shapes = _paged.Shapes(x.q, x.kv_pages, x.kv_pages, N)
            for launch in found:
                if launch.kernel.__name__ != "attend_kernel":
                    continue
                constants = dict(launch.constants)
                tiles = _paged.TileConfig(constants["ROWS"], constants["BLOCK_K"], launch.num_warps, launch.num_stages)
                taken = compiler.binary(launch, compiler.TARGETS["sm_90"]).shared
                assert taken <= _paged.shared_memory(shapes, tiles) <= _launch.shared_memory_limit(target), launch
                checked += 1
    assert checked >= 2


@pytest.mark.parametrize("pages", ("int8", "float8_e4m3fn"))
def test_eight_bits_are_converted_in_registers(pages, monkeypatch):
    """Keys and values in pairs of features need shared memory only for their bytes, for any tile."""
    shapes = SHAPES["page_attention"] | dict.fromkeys(("k_pages", "v_pages"), (1, PAGES, 16, 2, 128))
    dtypes = DTYPES | dict.fromkeys(("k_pages", "v_pages"), pages)
    arrays = {n: jnp.zeros(shape, dtypes.get(n, "int32")) for n, shape in (shapes | dict(q=(1, N, 8, 128))).items()}
    x, target, spec = OPERATIONS["page_attention"].algorithm.operands(**arrays), KINDS["sm_90"], CacheSpec()
    of = _paged.Shapes(x.q, x.k_pages, x.v_pages, N)
    with lowering_for(target):
        tiles = {_paged.tiles_of(of, config): config for config in page_attention.space(spec, x, target)}
        for tile, config in tiles.items():
            call = partial(page_attention, *x, spec=CacheSpec(softmax_scale=0.1), config=config)
            launch, *_ = compiler.launches(monkeypatch, _launch, call)
            assert dict(launch.constants)["PAIRS"]
            found = compiler.binary(launch, compiler.TARGETS["sm_90"])
            assert found.shared <= _paged.shared_memory(of, tile) and not found.spilled, launch
    assert len(tiles) >= 2
