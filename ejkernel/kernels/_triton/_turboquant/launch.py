"""Attention over a cache quantised by TurboQuant, launch by launch: rows of few tokens, their merge, and a prefill.

Sequences with few tokens, whose query heads of a group fit one tile together, have a row each, split over the keys. The
others have rows of a larger tile, which are not split. Each launch computes its own tokens, in place of what the one
before it left. Queries are rotated and projected before, and results rotated back after, by XLA.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._paged import SMALLEST_TILE, TileConfig, power_of_two
from ejkernel.kernels._triton._paged.launch import EVERY, MOST_TOKENS_OF_DECODES, SPLITS_PER_TILE
from ejkernel.kernels._triton._paged.merge import merge_kernel
from ejkernel.kernels._triton._paged.problem import Problem, Schedule, strides_of
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.turboquant import Matrices, Quantised, product, sign_factor

from . import keys_are_rows, prefill_tiles
from .entries import codebooks_of, tables_of
from .kernel import turboquant_kernel
from .problem import Format

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
    format, codebooks = _format(x.q, pools, matrices), codebooks_of(matrices)
    step = Step(
        _rotated(x.q, matrices), *pools, tables_of(codebooks) if format.ptx else codebooks,
        x.context_lens, x.query_start_loc, x.num_seqs, x.block_tables, x.sinks,
    )  # fmt: skip
    problem = _problem(x.q, step, spec)
    tokens = tiles.rows // (problem.H // problem.G)
    decode = Schedule(
        rows=problem.N, tokens=tokens, packed=False, padding=False, least=1, most=tokens, splits=splits,
        keys_per_split=0,
    )  # fmt: skip
    # Where most sequences have few tokens theirs are the tiles of all, which then have several rows of a sequence.
    if max(tokens, min(MOST_TOKENS_OF_DECODES, problem.N * tokens)) >= problem.T:
        decode = replace(decode, rows=_packed_rows(problem, tokens), packed=True, padding=True, most=EVERY)
    results = _decoded(step, problem, decode, format, tiles)
    if not decode.padding:
        tiles = prefill_tiles(x)
        tokens = tiles.rows // (problem.H // problem.G)
        rest = replace(
            decode, rows=_packed_rows(problem, tokens), tokens=tokens, packed=True, padding=True,
            least=decode.most + 1, most=EVERY, splits=1,
        )  # fmt: skip
        results = _launched(step, results, {}, problem, rest, format, tiles)
    return jax.vmap(product)(results["o"], matrices.rotation_matrix).astype(x.q.dtype), results["lse"]


def _rotated(q: Array, matrices: Matrices) -> Array:
    """Π·q followed by √(π/2e)·S·Π·q, of q [b,t,h,d], by one product: the matrices' own costs less than a launch."""

    def of_batch(q: Array, by: Matrices) -> Array:
        projection = product(sign_factor(by) * by.qjl_projection, by.rotation_matrix)
        return product(q.astype(jnp.float32), jnp.concatenate([by.rotation_matrix, projection]).T)

    return jax.vmap(of_batch)(q, matrices)


def _packed_rows(problem: Problem, tokens: int) -> int:
    """Enough rows of so many tokens for any sequences, and for the tokens of none."""
    return problem.N + problem.T // tokens + 1


def _of_batch(x: Array, batch: int) -> Array:
    return jnp.broadcast_to(x, (batch, *x.shape[1:]))


def _problem(q: Array, x: Step, spec: CacheSpec) -> Problem:
    (_, T, H, D), (_, pages, page, G) = q.shape, x.value_norms.shape
    slots, sinks = strides_of(x.value_norms.shape), 0 if x.sinks is None else x.sinks.shape[2]
    return Problem(
        N=x.block_tables.shape[1], T=T, H=H, G=G, D=D, V=D, pages=pages, page=page, columns=x.block_tables.shape[2],
        length=None, causal=True, left=spec.left, scale=spec.softmax_scale, softcap=spec.softcap,
        k=slots, v=slots, v_offset=0, k_scale=None, v_scale=None,
        sinks=sinks, sinks_batch=0 if x.sinks is None or x.sinks.shape[0] == 1 else H * sinks,
        drafts=0, sinks_of_empty=False, ptx=_launch.has_ptx(),
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
        config=KernelConfig(num_warps=4, num_stages=1), problem=problem, schedule=schedule,
        SPLITS=SPLITS_PER_TILE, V_WIDTH=4 * _width(format.words),
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
        ROWS=tiles.rows, BLOCK_K=tiles.keys, WORDS=_width(format.words), SIGNS=_width(format.signs),
        TRANSPOSED=keys_are_rows(tiles),
    )  # fmt: skip


def _results(x: Step, problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of Π·o and lse."""
    shape, of = x.q.shape[:3], jax.ShapeDtypeStruct
    return dict(o=of((*shape, problem.V), jnp.float32), lse=of(shape, jnp.float32))


def _width(size: int) -> int:
    return max(SMALLEST_TILE, power_of_two(size))
