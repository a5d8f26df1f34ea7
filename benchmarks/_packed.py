"""What the benchmarks of operations over groups of rows share: the command line, the run, contenders of both worlds."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# torch needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
import numpy as np
from _harness import RESULTS, Prepared, Row, Unavailable, means, queued, result_file, save, show

from ejkernel import callib
from ejkernel.cli._equations import equations
from ejkernel.types import Platform

MODES = {"fwd": 1.0, "bwd": 2.0, "fwd_bwd": 3.0}

Case = Callable[[Any, str, argparse.Namespace], list[Row]]


def run(benchmark: str, doc: str, shapes: Mapping[str, Any], case: Case, convention: str, unit: str) -> int:
    """Measures all shapes in all modes and saves the rows; 1 if an implementation of ours failed or was wrong."""
    arguments = _arguments(doc, shapes)
    print(f"{jax.devices()[0].device_kind}; {convention}\nceilings")
    ceilings = callib.calibrate(tell=lambda line: print(f"  {line}"))
    rows, file = [], result_file(benchmark, arguments.out)
    for name in arguments.shapes:
        for mode in arguments.modes:
            found = case(shapes[name], mode, arguments)
            show(f"{shapes[name]}, {mode}", found, unit)
            rows += found
            save(file, rows, ceilings, convention)
    print("", *means(rows), sep="\n")
    print(f"\nwritten: {file}")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def _arguments(doc: str, shapes: Mapping[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = dict(nargs="+", metavar="NAME")
    parser.add_argument("--shapes", **several, choices=shapes, default=list(shapes), help=f"of {', '.join(shapes)}")
    parser.add_argument("--modes", **several, choices=MODES, default=["fwd", "fwd_bwd"], help=f"of {', '.join(MODES)}")
    parser.add_argument("--platforms", **several, choices=("auto", *Platform), default=["auto"], help="of ours")
    parser.add_argument("--repeats", type=int, default=11, help="batches of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    return parser.parse_args(sys.argv[1:])


# --- The referee


def gate(parts: Callable[[Sequence[Any]], list[Any]], formula: Callable[[Any], list[np.ndarray]], dtype: Any):
    """Judges `parts` of the results by their distance to `formula(float64)`, in units of that of `formula(dtype)`."""
    with jax.enable_x64(True):
        exact = formula(np.dtype(np.float64))
    units = [_distance(x, y) for x, y in zip(formula(dtype), exact, strict=True)]

    def error(results: Sequence[Any]) -> float:
        found = [_distance(_numbers(x), y) for x, y in zip(parts(results), exact, strict=True)]
        return float(np.max(np.divide(found, np.maximum(units, 1e-12))))  # NaN where one is

    return error


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def _numbers(x: Any) -> np.ndarray:
    """An array of JAX or of torch as float64 numbers of the host."""
    return x.detach().double().cpu().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)


# --- The contenders


def of_jax(function: Callable[..., Any], arrays: tuple, cotangent: Any, mode: str, operation: str = "") -> Prepared:
    """`function(*arrays)` and its gradients as a mode asks; the backward alone has its residuals from before."""

    def fwd_bwd(arrays, cotangent):
        o, pull = jax.vjp(function, *arrays)
        return (o, *pull(cotangent))

    if mode == "bwd":
        pull = jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1])(*arrays)
        run, given = jax.jit(lambda pull, cotangent: pull(cotangent)), (pull, cotangent)
    else:
        run = jax.jit(fwd_bwd if mode == "fwd_bwd" else lambda arrays, cotangent: (function(*arrays),))
        given = (arrays, cotangent)
    ran = equations(run.trace(*given).jaxpr, operation) if operation else []
    detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
    return Prepared(jax.block_until_ready(run(*given)), queued(run, *given), detail)


def of_torch(function: Callable[..., Any], arrays: tuple, cotangent: Any, mode: str) -> Prepared:
    """The same of a function of torch, whose arrays are those of JAX."""
    torch = torch_on_gpu()
    arrays = [torch.from_dlpack(x).requires_grad_(mode != "fwd") for x in arrays]
    cotangent = torch.from_dlpack(cotangent)

    def fwd_bwd():
        o = function(*arrays)
        return (o, *torch.autograd.grad(o, arrays, cotangent))

    saved = function(*arrays) if mode == "bwd" else None
    once = {
        "fwd": lambda: (function(*arrays),),
        "bwd": lambda: torch.autograd.grad(saved, arrays, cotangent, retain_graph=True),
        "fwd_bwd": fwd_bwd,
    }[mode]

    def batch(calls: int) -> None:
        for _ in range(calls):
            once()
        torch.cuda.synchronize()

    return Prepared(once(), batch)


def torch_on_gpu() -> Any:
    """The module."""
    torch = imported("torch")
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        raise Unavailable("torch and JAX do not share a GPU here")
    return torch


def imported(name: str) -> Any:
    """A module, or why the contender does not take part."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error
