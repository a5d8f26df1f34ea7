"""Attention over a cache quantised by TurboQuant, launch by launch: rows of few tokens, their merge, and the others.

Sequences with few tokens, whose query heads of a group fit one tile together, have a row each, split over the keys. The
others have rows of a larger tile, which are not split. Each launch computes its own tokens, in place of what the one
before it left. Queries are rotated and projected before, and results rotated back after, by XLA. Keys of sequences with
more tokens than a tile has are dequantised (prefill.py), unless products are of float32.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._paged import TileConfig
from ejkernel.kernels._triton._paged.launch import EVERY, MOST_TOKENS_OF_DECODES, SPLITS_PER_TILE
from ejkernel.kernels._triton._paged.merge import merge_kernel
from ejkernel.kernels._triton._paged.problem import Problem, Schedule, strides_of
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.turboquant import Matrices, Quantised, product, projection_of_rotated

from . import keys_are_rows, prefill_tiles
from .dequantise import dequantised
from .entries import codebooks_of, tables_of
from .kernel import turboquant_kernel
from .prefill import divided, prefill, slots_of_page
from .problem import Format, widths

# o and lse, as far as they are computed.
Results = dict[str, Array]


class Step(NamedTuple):
    """Tokens that attend over the keys of their sequences, as the kernel has them; without sinks these are None."""

    q: Array
    key_indices: Array
    key_signs: Array
    key_norms: Array
    value_indices: Array
    value_norms: Array
    codebooks: Array
    context_lens: Array
    query_start_loc: Array
    num_seqs: Array
    block_tables: Array
    sinks: Array | None


def attend(
    x: Any, pools: Quantised, matrices: Matrices, spec: CacheSpec, splits: int, tiles: TileConfig
) -> tuple[Array, Array]:
    """o [b,t,h,d] in the dtype of q and lse [b,t,h] float32, of the operands of one of the operations; 0 and −∞ for
    tokens of no sequence.

    `splits` and `tiles` are how rows of few tokens are computed.
    """
    matrices = Matrices(*(_of_batch(a, x.q.shape[0]) for a in matrices))
    pools = Quantised(*(_of_batch(a, max(pool.shape[0] for pool in pools)) for a in pools))
    over_cache = partial(_over_cache, pools=pools, matrices=matrices, spec=spec, splits=splits, tiles=tiles)
    most = _tokens(x, prefill_tiles(x))
    if x.q.dtype.itemsize == 4 or not slots_of_page(x) or x.q.shape[1] <= max(most, _tokens_of_decodes(x, tiles)):
        return over_cache(x)
    problem, format = _problem(x, pools, spec), _format(x.q, pools, matrices)
    dequantise = partial(
        dequantised, x=x, pools=pools, codebooks=_codebooks(matrices, format), matrices=matrices, problem=problem,
        format=format,
    )  # fmt: skip
    return divided(x, most, over_cache, partial(prefill, spec=spec, dequantise=dequantise))


def _tokens(x: Any, tiles: TileConfig) -> int:
    """Tokens of a row, with all query heads of a group."""
    return tiles.rows // (x.q.shape[2] // x.value_norms_pages.shape[3])


def _tokens_of_decodes(x: Any, tiles: TileConfig) -> int:
    """Tokens of a step whose sequences, most of which then have few of them, have the tiles of a decode all."""
    tokens = _tokens(x, tiles)
    return max(tokens, min(MOST_TOKENS_OF_DECODES, x.block_tables.shape[1] * tokens))


def _over_cache(
    x: Any, *, pools: Quantised, matrices: Matrices, spec: CacheSpec, splits: int, tiles: TileConfig
) -> tuple[Array, Array]:
    """The same, over the cache as it is."""
    format, problem = _format(x.q, pools, matrices), _problem(x, pools, spec)
    # Of 16 bits rotated queries are rounded to float16, and results to the dtype of q: to as many bits as TF32 has.
    precision = "highest" if x.q.dtype.itemsize == 4 else "default"
    step = Step(
        _rotated(x.q, matrices, precision), *pools, _codebooks(matrices, format), x.context_lens, x.query_start_loc,
        x.num_seqs, x.block_tables, x.sinks,
    )  # fmt: skip
    tokens = _tokens(x, tiles)
    decode = Schedule(
        rows=problem.N, tokens=tokens, packed=False, padding=False, least=1, most=tokens, splits=splits,
        keys_per_split=0,
    )  # fmt: skip
    if _tokens_of_decodes(x, tiles) >= problem.T:
        decode = replace(decode, rows=_packed_rows(problem, tokens), packed=True, padding=True, most=EVERY)
    results = _decoded(step, problem, decode, format, tiles)
    if not decode.padding:
        tiles = prefill_tiles(x)
        tokens = _tokens(x, tiles)
        rest = replace(
            decode, rows=_packed_rows(problem, tokens), tokens=tokens, packed=True, padding=True,
            least=decode.most + 1, most=EVERY, splits=1,
        )  # fmt: skip
        results = _launched(step, results, {}, problem, rest, format, tiles)
    o = jax.vmap(partial(product, precision=precision))(results["o"], matrices.rotation_matrix)
    return o.astype(x.q.dtype), results["lse"]


def _codebooks(matrices: Matrices, format: Format) -> Array:
    """As `load_codebook` reads them."""
    codebooks = codebooks_of(matrices)
    return tables_of(codebooks) if format.ptx else codebooks


def _rotated(q: Array, matrices: Matrices, precision: str) -> Array:
    """Π·q followed by √(π/2e)·S·Π·q, of q [b,t,h,d], by one product: the matrices' own costs less than a launch."""

    def of_batch(q: Array, by: Matrices) -> Array:
        both = jnp.concatenate([by.rotation_matrix, projection_of_rotated(by, precision)])
        return product(q.astype(jnp.float32), both.T, precision)

    return jax.vmap(of_batch)(q, matrices)


def _packed_rows(problem: Problem, tokens: int) -> int:
    """Enough rows of so many tokens for any sequences, and for the tokens of none."""
    return problem.N + problem.T // tokens + 1


def _of_batch(x: Array, batch: int) -> Array:
    return jnp.broadcast_to(x, (batch, *x.shape[1:]))


def _problem(x: Any, pools: Quantised, spec: CacheSpec) -> Problem:
    (_, T, H, D), (_, pages, page, G) = x.q.shape, pools.value_norms.shape
    slots, sinks = strides_of(pools.value_norms.shape), 0 if x.sinks is None else x.sinks.shape[2]
    return Problem(
        N=x.block_tables.shape[1], T=T, H=H, G=G, D=D, V=D, pages=pages, page=page, columns=x.block_tables.shape[2],
        length=None, causal=True, left=spec.left, scale=spec.softmax_scale, softcap=spec.softcap,
        k=slots, v=slots, v_offset=0, k_scale=None, v_scale=None,
        sinks=sinks, sinks_batch=0 if x.sinks is None or x.sinks.shape[0] == 1 else H * sinks,
        draft_words=0, sinks_of_empty=False, ptx=_launch.has_ptx(),
    )  # fmt: skip


def _format(q: Array, pools: Quantised, matrices: Matrices) -> Format:
    """Products of queries of sixteen bits are in float16, which has more of a codebook's bits than bfloat16."""
    half = q.dtype.itemsize == 2
    return Format(
        words=pools.key_indices.shape[4] // 2, signs=pools.key_signs.shape[4],
        key_entries=matrices.key_codebook.shape[1], value_entries=matrices.value_codebook.shape[1],
        dtype=tl.float16 if half else tl.float32,
        precision="ieee" if half or _launch.is_rocm() else "tf32x3",
        ptx=half and _launch.has_ptx(),
    )  # fmt: skip


def _decoded(x: Step, problem: Problem, schedule: Schedule, format: Format, tiles: TileConfig) -> Results:
    """Those of rows of few tokens, whose splits are merged."""
    if schedule.splits == 1:
        return _launched(x, {}, {}, problem, schedule, format, tiles)
    units, of = x.q.shape[0] * schedule.rows, jax.ShapeDtypeStruct
    of_split = (units * schedule.splits, schedule.tokens, problem.H)
    parts = dict(o_splits=of((*of_split, problem.V), jnp.float32), lse_splits=of(of_split, jnp.float32))
    found = _launched(x, {}, parts, problem, schedule, format, tiles)
    return launch_in_place(
        merge_kernel, x.context_lens, x.query_start_loc, x.num_seqs, x.sinks, None, found["o_splits"],
        found["lse_splits"],
        placed={}, new=_results(x, problem), grid=units * schedule.tokens * problem.H,
        # Most programs of few splits find nothing, or little: 64 × 1k took 5 µs with a warp on an H200, 14 with four.
        config=KernelConfig(num_warps=1 if schedule.splits <= SPLITS_PER_TILE else 4, num_stages=1),
        problem=problem, schedule=schedule,
        SPLITS=SPLITS_PER_TILE, V_WIDTH=4 * widths(format)["WORDS"],
    )  # fmt: skip


def _launched(
    x: Step, placed: Results, parts: Results, problem: Problem, schedule: Schedule, format: Format, tiles: TileConfig
) -> Results:
    """o and lse, new or in the place of given arrays, or the parts of their splits."""
    new = parts or ({} if placed else _results(x, problem))
    unwanted = {name: None for name in ("o", "lse", "o_splits", "lse_splits") if name not in (*placed, *new)}
    return launch_in_place(
        turboquant_kernel, *x, placed=placed, new=new,
        grid=x.q.shape[0] * schedule.rows * schedule.splits * problem.G,
        config=KernelConfig(num_warps=tiles.warps, num_stages=tiles.stages),
        problem=problem, schedule=schedule, format=format, **unwanted,
        ROWS=tiles.rows, BLOCK_K=tiles.keys, **widths(format),
        TRANSPOSED=keys_are_rows(tiles),
    )  # fmt: skip


def _results(x: Step, problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of Π·o and lse."""
    shape, of = x.q.shape[:3], jax.ShapeDtypeStruct
    return dict(o=of((*shape, problem.V), jnp.float32), lse=of(shape, jnp.float32))
