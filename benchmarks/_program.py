"""Shared by small benchmarks, which compare a few jitted programs without the registry of calls."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._contenders import Function, call
from ._harness import interleaved, queued, warmed
from ._records import RESULTS

Program = tuple[Function, tuple]
"""A compiled function and its arguments."""


def parser_of(description: str, repeats: int = 7) -> argparse.ArgumentParser:
    """A command line with `--repeats` and `--out`.

    Configs are those of heuristics unless EJKERNEL_AUTOTUNE_POLICY is set: measuring them would take longer than the
    benchmark, and disturb concurrent compilations.
    """
    os.environ.setdefault("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    return parser


def size(text: str) -> tuple[int, int]:
    """The type of an argument like 8x1024: sequences and tokens of each."""
    batch, tokens = map(int, text.split("x"))
    return batch, tokens


def compiled(cases: Mapping[tuple, Mapping[str, tuple[Function, tuple, Any]]]) -> dict[tuple, dict[str, Program]]:
    """The programs of all cases, compiled concurrently. The last part of a case is its mode.

    A case has functions by name, each with its operands and the cotangent of its result.
    """
    makers = {
        (case, name): cache(partial(_compiled, case[-1], *of))
        for case, functions in cases.items()
        for name, of in functions.items()
    }
    warmed(list(makers.values()))
    return {case: {name: makers[case, name]() for name in functions} for case, functions in cases.items()}


def _compiled(mode: str, function: Function, operands: tuple, cotangent: Any) -> Program:
    arguments = (operands, (), cotangent)
    return jax.jit(call(function, mode)).lower(*arguments).compile(), arguments


def milliseconds(programs: Mapping[str, Program], repeats: int) -> dict[str, float]:
    """The median time of a call of each program over interleaved rounds; NaN, with a message, if it failed."""
    times = {}
    for name, seconds in interleaved({name: queued(f, *x) for name, (f, x) in programs.items()}, repeats).items():
        if isinstance(seconds, Exception):
            print(f"{name} failed: {seconds}")
        times[name] = float("nan") if isinstance(seconds, Exception) else median(seconds) * 1e3
    return times


def difference(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference of all arrays, relative to the largest value of each; computed where the arrays are."""
    return max(float(_difference(a, b)) for a, b in zip(found, wanted, strict=True))


@jax.jit
def _difference(found: Array, wanted: Array) -> Array:
    found, wanted = (a.astype(jnp.float32) for a in (found, wanted))
    return jnp.abs(found - wanted).max() / jnp.abs(wanted).max()
