"""Asynchronous copies of blocks of keys and values from a cache to the buffers in vector memory."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .problem import Problem
from .work import WorkItem


def for_copies(stored, buffers, semaphores, table, problem: Problem, item: WorkItem, block, slot, act: Callable):
    """Calls `act(copy)` for the pieces of a block that hold visible keys of a work item, and for their scales."""
    begin = (lax.div(item.first, problem.keys) + block) * problem.caches[0].pieces
    start, stop = _pieces(item, block, problem)

    def of_piece(place, carry):
        column = begin + place
        if table is None:
            where = item.sequence * problem.columns + column
        else:
            page = table[item.sequence * problem.columns + lax.div(column, problem.pieces)]
            page = jnp.clip(page, 0, problem.pages - 1)
            where = page * problem.pieces + lax.rem(column, problem.pieces)
        for layout, source, buffer, semaphore in zip(problem.copied, stored, buffers, semaphores, strict=True):
            piece = item.batch * layout.pool + where if layout.pool else where
            for copy in layout.copies(source, buffer, semaphore, slot, piece, place):
                act(copy)
        return carry

    lax.fori_loop(start, stop, of_piece, 0)


def _pieces(item: WorkItem, block, problem: Problem) -> tuple[Any, Any]:
    """The range start ≤ n < stop of the pieces of a block that hold visible keys of a work item."""
    piece, pieces = problem.caches[0].piece, problem.caches[0].pieces
    begin = (lax.div(item.first, problem.keys) + block) * pieces
    first, stop = lax.div(item.first, piece), lax.div(item.stop + (piece - 1), piece)
    return jnp.maximum(first - begin, 0), jnp.minimum(stop - begin, pieces)


def wait(stored, buffers, semaphores, table, problem: Problem, item: WorkItem, block, slot):
    """Waits for the copies of a block, all at once if every piece is copied: a semaphore counts bytes."""
    start, stop = _pieces(item, block, problem)
    is_whole = stop - start == problem.caches[0].pieces

    @pl.when(is_whole)
    def _():
        for buffer, semaphore in zip(buffers, semaphores, strict=True):
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], semaphore.at[slot]).wait()

    @pl.when(jnp.logical_not(is_whole))
    def _():
        for_copies(stored, buffers, semaphores, table, problem, item, block, slot, lambda copy: copy.wait())
