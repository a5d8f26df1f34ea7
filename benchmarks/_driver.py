"""The driver of all benchmarks of operations: `python -m benchmarks flash_attention --modes fwd,fwd_bwd,jvp`.

Every contender is compared with the formula in float64 before it is timed. Programs are compiled before that, those of
one call concurrently. The table, and its record in benchmarks/results/, have the median time of a call, its rate, the
fraction of the rate of a matrix product (or a copy) that is interleaved with it, and the speedup over the best rival.

Rivals that are not installed have a row that says so. Some are found by environment variables: EJKERNEL_RELEASE and
EJKERNEL_BEFORE are folders with the release on PyPI (`pip install --target`) and with an earlier commit of this
library, which run in processes of their own; FA3_FOLDER has _vllm_fa3_C.abi3.so or _flashmla_C.abi3.so of vLLM's wheel.
"""

import argparse
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import callib
from ejkernel.types import Platform
from ejkernel.types.shapes import TBYTES, Shape, measured_operations, shapes_of

from ._harness import Check, Contender, Row, means, measure, show, warmed, yardstick
from ._records import RESULTS, result_file, save

LARGEST_ERROR = {"fwd": 2.0, "step": 3.0, "bwd": 3.0, "fwd_bwd": 3.0, "jvp": 3.0}
"""The largest allowed error of ours by mode, in units of that of the formula in the dtype of the inputs."""
_LARGEST_OF_A_RIVAL = 10.0


@dataclass(frozen=True)
class Case:
    """A call in one mode, to be measured.

    Attributes:
        contenders: the contenders, in the order of the table.
        judge: makes the check; it is called more than once.
        largest_error: the largest allowed error of ours; None for that of the mode.
        chained: the number of dependent calls that a contender makes at a time.
    """

    contenders: Sequence[Contender]
    judge: Callable[[], Check]
    largest_error: float | None = None
    chained: int = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the requested calls and writes the record; 1 if an implementation of ours failed or was wrong."""
    arguments = _parser().parse_args(argv)
    shapes = shapes_of(arguments.operation)
    if arguments.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    backend = jax.default_backend()
    if arguments.device not in (None, backend):
        raise SystemExit(f"no {arguments.device} here: JAX runs on {backend}")
    try:
        chosen = [_shape(asked, shapes) for asked in (arguments.shapes or ",".join(shapes)).split(",")]
    except ValueError as error:
        raise SystemExit(f"--shapes: {error}") from error
    dtype = jnp.dtype(arguments.dtype or ("float32" if backend == "cpu" else "bfloat16"))
    return _run(chosen, dtype, arguments)


def _run(shapes: Sequence[Shape], dtype: jnp.dtype, arguments: argparse.Namespace) -> int:
    benchmark = importlib.import_module(f".{arguments.operation}", __package__)
    convention = shapes[0].convention
    evidence = arguments.evidence or f"{arguments.operation} beside its rivals"
    print(f"{jax.devices()[0].device_kind}; {convention}\nceilings")
    ceilings = callib.calibrate(tell=lambda line: print(f"  {line}"))
    rows, file = [], result_file(arguments.operation, arguments.out)
    for shape in shapes:
        modes = [mode for mode in arguments.modes or _modes(shape) if mode in shape.modes]
        cases = {mode: benchmark.case(shape, mode, dtype, arguments.platforms) for mode in modes}
        for mode, case in cases.items():
            wanted = [c for c in case.contenders if c.ours or arguments.rivals is None or c.name in arguments.rivals]
            cases[mode] = Case(wanted, case.judge, case.largest_error, case.chained)
        warmed([task for case in cases.values() for task in (case.judge, *(c.warm for c in case.contenders))])
        for mode, case in cases.items():
            rows += measured(shape, mode, dtype, case, arguments.repeats)
            save(file, rows, ceilings, evidence, convention)
    print("", *means(rows), f"written: {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def _modes(shape: Shape) -> list[str]:
    """All modes except the backward alone, which is measured with its forward."""
    return [mode for mode in shape.modes if mode != "bwd"]


def measured(shape: Shape, mode: str, dtype: jnp.dtype, case: Case, repeats: int) -> list[Row]:
    """Measures one call in one mode, and prints and returns the rows."""
    unit = shape.unit(mode)

    def judged(results: Sequence[Any]) -> float:
        return case.judge()(results)  # slow to make, and not needed without results

    rows = measure(
        str(shape),
        mode,
        case.contenders,
        judged,
        bounds=(case.largest_error or LARGEST_ERROR[mode], _LARGEST_OF_A_RIVAL),
        work=shape.work(mode),
        yardstick=yardstick(None if unit == TBYTES else dtype.name),
        repeats=repeats,
        chained=case.chained,
    )
    show(f"{shape}, {dtype}, {mode}", rows, unit)
    return rows


# --- The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = lambda text: text.split(",")
    parser.add_argument("operation", choices=measured_operations())
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="what JAX prefers if not given")
    parser.add_argument("--shapes", metavar="NAME[@BxS],…", help="all that are in ejkernel/types/shapes if not given")
    parser.add_argument("--modes", type=_chosen("mode", LARGEST_ERROR), help="all but bwd, which fwd_bwd holds")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16, on a CPU float32")
    parser.add_argument("--platforms", type=_chosen("platform", ("auto", *Platform)), default=["auto"], help="of ours")
    parser.add_argument("--rivals", type=listed, help="e.g. 'jax.nn cudnn,torch cudnn'; all if not given")
    parser.add_argument("--repeats", type=_count, default=11, help="batches of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--evidence", help="what the record is evidence for, as the index says it")
    return parser


def _chosen(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """An argument type: names separated by commas, each one of the known ones."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"no such {what}: {name}; known are {', '.join(known)}")
        return text.split(",")

    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _shape(asked: str, known: Mapping[str, Any]) -> Shape:
    """A named call; @batch×length (for grouped_matmul @rows) changes its size."""
    name, _, size = asked.partition("@")
    numbers = size.split("x") if size else []
    if name not in known or not all(map(str.isdecimal, numbers)):
        raise ValueError(f"{asked!r} is not a name, or name@BxS, of {', '.join(known)}")
    if not numbers:
        return known[name]
    try:
        return known[name].at(*map(int, numbers))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{asked!r}: {name} has no such size") from error
