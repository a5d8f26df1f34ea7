"""Attention over a cache, launch by launch: rows of few tokens, the merge of their splits, and rows of a prefill.

Sequences with few tokens in the step, whose query heads of a group fit one tile together, are decoded: a row each,
split over the keys so that all multiprocessors have work; few splits are merged in the launch that computes them. The
others have rows of a larger tile, which are not split. Each launch computes its own tokens, in place of what the one
before it left.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import KernelConfig

from . import KEYS_OF_INVARIANT_SPLIT, are_pairs, prefill_tiles, tiles_of_drafts
from .drafts import causal_drafts
from .kernel import attend_kernel
from .merge import merge_kernel
from .problem import Problem, Schedule, strides_of
from .tile_sizes import Shapes, TileConfig, keys_of_drafts, power_of_two, width

EVERY = 2**31 - 1
# Tokens of a step that is computed by the tiles of a decode alone, if those of all sequences may be decodes.
MOST_TOKENS_OF_DECODES = 256
# Splits of a row that the program of one of them merges: more are read faster by a program for each head. One query of
# 32768 keys in 16 splits took 36 µs so on an H200, 48 where the last program merged them; of 4096 in 8, 14.7 and 16.5.
MOST_MERGED_AT_ONCE = 2
# Splits that are read together, by a program for each head, and numbers of them that a thread then holds at most.
SPLITS_PER_TILE, _NUMBERS_PER_THREAD = 16, 128
# o and lse, as far as they are computed.
Results = dict[str, Array]


class Step(NamedTuple):
    """Tokens that attend over the keys of their sequences; None where absent.

    Attributes:
        q: [b,t,h,d].
        k, v: [b?,p,s,g,·]; or both [b?,p,s,g,2,d], the same array.
        context_lens: [b,n], how many keys each sequence has; all slots of its page if None.
        query_start_loc: [b,n + 1], and num_seqs [b,1]; None where every sequence has as many tokens.
        first_keys: [b,n], the first keys that there are of each sequence.
        block_tables: [b,n,j]; None where a sequence has the page of its number.
        sinks: [b?,h,x]; k_scale and v_scale [b?,p?,s?,g?]; draft_words [b,t,w] (drafts.py); plan [b?,l,i,8].
        tiled_keys: [1], up to how many keys decodes are computed with the prefills.
        causal_drafts: [b,n], how many drafts were computed before a launch that has the others alone.
    """

    q: Array
    k: Array
    v: Array
    context_lens: Array | None = None
    query_start_loc: Array | None = None
    num_seqs: Array | None = None
    first_keys: Array | None = None
    block_tables: Array | None = None
    sinks: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    draft_words: Array | None = None
    plan: Array | None = None
    tiled_keys: Array | None = None
    causal_drafts: Array | None = None


def attend(
    x: Step,
    spec: CacheSpec,
    sequences: int,
    splits: int,
    tiles: TileConfig,
    causal: bool = True,
    sinks_of_empty: bool = False,
    prefill: Callable[[int], tuple[Results, Array | None]] | None = None,
) -> tuple[Array, Array]:
    """o [b,t,h,e] in the dtype of q and lse [b,t,h] float32; 0 and −∞ for tokens of no sequence.

    `splits` and `tiles` are how rows of few tokens are computed. A plan decides their splits itself, and is left aside
    where these may not depend on the step. `prefill(n)` gives o and lse of all tokens but those of sequences with 1 to
    n of them in the step, in the place of the launch that is made here, without the drafts behind `causal_drafts`; and
    `tiled_keys` if it has some of these too.
    """
    x = x._replace(k=_launch.of_cache(x.k), v=_launch.of_cache(x.v))
    problem = _problem(x, spec, sequences, causal, sinks_of_empty)
    tokens, fixed = tiles.rows // (problem.H // problem.G), 0
    if spec.batch_invariant or _launch.is_rocm():  # splits of a plan are merged at once
        x = x._replace(plan=None)
    if spec.batch_invariant:
        fixed = _keys_per_split(problem, spec, tiles)
        splits = triton.cdiv(problem.page * max(problem.columns, 1), fixed)
    decode = Schedule(
        rows=problem.N, tokens=tokens, packed=False, padding=False, least=1, most=tokens, splits=splits,
        keys_per_split=fixed,
    )  # fmt: skip
    if x.plan is not None:
        items = x.plan.shape[1] * x.plan.shape[2]
        decode = replace(decode, items=items, plan_batch=0 if x.plan.shape[0] == 1 else items)
    if prefill is not None and tokens < problem.T:
        results, tiled_keys = prefill(tokens)
        if x.draft_words is not None:
            results = _with_drafts(x, problem, spec, tokens + 1, results)
        results = _decoded(x._replace(tiled_keys=tiled_keys), problem, decode, tiles, results)
        return results["o"], results["lse"]
    if x.query_start_loc is not None and _is_one_launch(x, spec, problem, tokens):
        decode = replace(decode, rows=_packed_rows(problem, tokens), packed=True, padding=True, most=EVERY)
    # What a plan leaves out, be it of another step, is nothing rather than what was in memory.
    nothing = {} if x.plan is None else dict(o=jnp.zeros((*x.q.shape[:3], problem.V), x.q.dtype))
    results = _decoded(x, problem, decode, tiles, nothing)
    if x.query_start_loc is not None and not decode.padding:
        results = _prefilled(x, problem, decode.most + 1, results)
    return results["o"], results["lse"]


def _is_one_launch(x: Step, spec: CacheSpec, problem: Problem, tokens: int) -> bool:
    """Whether the tiles of the decode compute all sequences of a step, since most of it has to be decodes.

    A sequence with more tokens than a tile has several rows. Which tile it is must not follow from the step if that is
    to be invariant.
    """
    if x.plan is not None:
        return False
    few = min(MOST_TOKENS_OF_DECODES, problem.N * tokens) >= problem.T and not spec.batch_invariant
    return few or tokens >= problem.T


def _packed_rows(problem: Problem, tokens: int) -> int:
    """How many rows of so many tokens are enough for any sequences, and for the tokens of none."""
    return problem.N + problem.T // tokens + 1


def _problem(x: Step, spec: CacheSpec, sequences: int, causal: bool, sinks_of_empty: bool) -> Problem:
    (_, T, H, D), (_, pages, page, G), paired = x.q.shape, x.k.shape[:4], x.k.ndim == 6
    of = lambda array: None if array is None else strides_of(array.shape)
    return Problem(
        N=sequences, T=T, H=H, G=G, D=D, V=x.v.shape[-1], pages=pages, page=page,
        columns=0 if x.block_tables is None else x.block_tables.shape[2],
        length=T // sequences if x.query_start_loc is None else None,
        causal=causal and not (x.query_start_loc is None and sequences == T),  # one token sees all of its keys
        left=spec.left,
        scale=spec.softmax_scale, softcap=spec.softcap,
        k=strides_of(x.k.shape[:4], 1 + paired), v=strides_of(x.v.shape[:4], 1 + paired), v_offset=D * paired,
        k_scale=of(x.k_scale), v_scale=of(x.v_scale),
        sinks=0 if x.sinks is None else x.sinks.shape[2],
        sinks_batch=0 if x.sinks is None or x.sinks.shape[0] == 1 else H * x.sinks.shape[2],
        draft_words=0 if x.draft_words is None else x.draft_words.shape[2],
        sinks_of_empty=sinks_of_empty, ptx=_launch.has_ptx(),
    )  # fmt: skip


def _keys_per_split(problem: Problem, spec: CacheSpec, tiles: TileConfig) -> int:
    """Whole tiles, whatever else is in the step; where splits are asked for, of all keys that a sequence can have."""
    if spec.num_splits is None:
        return triton.cdiv(KEYS_OF_INVARIANT_SPLIT, tiles.keys) * tiles.keys
    keys = problem.page * max(problem.columns, 1)
    return triton.cdiv(triton.cdiv(keys, spec.num_splits), tiles.keys) * tiles.keys


def _decoded(x: Step, problem: Problem, schedule: Schedule, tiles: TileConfig, results: Results) -> Results:
    """Those of rows of few tokens, whose splits are merged."""
    if schedule.splits == 1 and x.plan is None:
        return _attend(x, problem, schedule, tiles, results)
    slots = x.q.shape[0] * (2 * schedule.items or schedule.rows * schedule.splits)
    of_split, of = (slots, schedule.tokens, problem.H), jax.ShapeDtypeStruct
    parts = dict(o_splits=of((*of_split, problem.V), jnp.float32), lse_splits=of(of_split, jnp.float32))
    if x.plan is not None or _are_merged_at_once(schedule):
        parts["arrivals"] = of((slots, problem.G), jnp.int32)
        return _attend(x, problem, schedule, tiles, results, parts)
    units = x.q.shape[0] * schedule.rows
    found = _launched(
        attend_kernel, x, {}, parts, dict(o=None, lse=None, arrivals=None), units * schedule.splits * problem.G,
        problem, schedule, tiles, **_sizes(x, problem, schedule, tiles),
    )  # fmt: skip
    tables = x.context_lens, x.query_start_loc, x.num_seqs, x.sinks, x.tiled_keys
    return _launched(
        merge_kernel, (*tables, found["o_splits"], found["lse_splits"]), results, _missing(x, problem, results), {},
        units * schedule.tokens * problem.H, problem, schedule, tiles._replace(warps=4, stages=1),
        SPLITS=SPLITS_PER_TILE, V_WIDTH=width(x.v),
    )  # fmt: skip


def _are_merged_at_once(schedule: Schedule) -> bool:
    """Whether the last program of a row merges its splits.

    On ROCm none does, for want of a GPU to run it on. Nor where splits have a fixed size, so that the order of the sum
    does not follow from how many there may be.
    """
    return schedule.splits <= MOST_MERGED_AT_ONCE and not schedule.keys_per_split and not _launch.is_rocm()


def _attend(
    x: Step, problem: Problem, schedule: Schedule, tiles: TileConfig, results: Results, parts: Results | None = None
) -> Results:
    """Those of rows that are not split, or whose splits are merged in the launch, by way of arrays of these types."""
    programs = x.q.shape[0] * (schedule.items or schedule.rows * schedule.splits) * problem.G
    absent = {name: None for name in ("o_splits", "lse_splits", "arrivals") if not parts}
    found = _launched(
        attend_kernel, x, results, _missing(x, problem, results) | (parts or {}), absent, programs, problem, schedule,
        tiles, zeroed="arrivals", **_sizes(x, problem, schedule, tiles),
    )  # fmt: skip
    return {name: found[name] for name in ("o", "lse")}


def _prefilled(x: Step, problem: Problem, least: int, results: Results) -> Results:
    """Those of sequences with `least` tokens or more, and of the tokens of none."""
    tiles = prefill_tiles(Shapes(x.q, x.k, x.v, problem.N, drafts=x.draft_words is not None))
    return _attend(x._replace(plan=None), problem, _unsplit(problem, least, tiles), tiles, results)


def with_drafts(x: Step, spec: CacheSpec, sequences: int, results: Results) -> Results:
    """o and lse of all keys and sinks, from those without the drafts behind the causal ones."""
    return _with_drafts(x, _problem(x, spec, sequences, causal=True, sinks_of_empty=False), spec, 1, results)


def _with_drafts(x: Step, problem: Problem, spec: CacheSpec, least: int, results: Results) -> Results:
    """The same of sequences with `least` tokens or more, in a launch that continues the softmax."""
    problem = replace(problem, sinks=0, only_drafts=True)
    tiles = tiles_of_drafts(Shapes(x.q, x.k, x.v, problem.N), spec.batch_invariant)
    schedule = replace(_unsplit(problem, least, tiles), padding=False)
    before = causal_drafts(x.draft_words, x.query_start_loc, x.num_seqs)
    return _attend(x._replace(plan=None, sinks=None, causal_drafts=before), problem, schedule, tiles, results)


def _unsplit(problem: Problem, least: int, tiles: TileConfig) -> Schedule:
    """Rows of all tokens of sequences with `least` or more, and of the tokens of none."""
    tokens = tiles.rows // (problem.H // problem.G)
    return Schedule(
        rows=_packed_rows(problem, tokens), tokens=tokens, packed=True, padding=True, least=least, most=EVERY,
        splits=1, keys_per_split=0,
    )  # fmt: skip


def _missing(x: Step, problem: Problem, results: Results) -> dict[str, jax.ShapeDtypeStruct]:
    """The types of those of o and lse that there are not yet."""
    shape = x.q.shape[:3]
    of = jax.ShapeDtypeStruct
    types = dict(o=of((*shape, problem.V), x.q.dtype), lse=of(shape, jnp.float32))
    return {name: kind for name, kind in types.items() if name not in results}


def _sizes(x: Step, problem: Problem, schedule: Schedule, tiles: TileConfig) -> dict[str, int]:
    v_width = width(x.v)
    splits_in_registers = max(1, _NUMBERS_PER_THREAD * 32 * tiles.warps // (tiles.rows * v_width))
    splits = min(splits_in_registers, SPLITS_PER_TILE if schedule.items else power_of_two(schedule.splits))
    shapes = Shapes(x.q, x.k, x.v, problem.N)
    of_drafts = tiles.keys if problem.only_drafts else min(tiles.keys, keys_of_drafts(shapes))
    return dict(
        ROWS=tiles.rows, BLOCK_K=tiles.keys, WIDTH=width(x.q), V_WIDTH=v_width, SPLITS=splits,
        PAIRS=are_pairs(shapes, tiles), BLOCK_DRAFTS=of_drafts,
    )  # fmt: skip


def _launched(
    kernel: Any,
    operands: Sequence[Array | None],
    placed: Results,
    new: dict[str, jax.ShapeDtypeStruct],
    unwanted: dict[str, None],
    grid: int,
    problem: Problem,
    schedule: Schedule,
    tiles: TileConfig,
    zeroed: str = "",
    **sizes: int,
) -> Results:
    """The outputs of a launch by name, new ones and those in the place of given arrays."""
    placed = {name: placed[name] for name in ("o", "lse") if name in placed}  # in the order of the parameters
    return launch_in_place(
        kernel, *operands, placed=placed, new=new, zeroed=(zeroed,), grid=grid,
        config=KernelConfig(num_warps=tiles.warps, num_stages=tiles.stages),
        problem=problem, schedule=schedule, **unwanted, **sizes,
    )  # fmt: skip
