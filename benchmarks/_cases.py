"""What benchmarks of layers by their names share: the command line, and a run that saves after every case."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _harness import RESULTS, Contender, Gate, Row, means, measure, result_file, save, show, warmed, yardstick

from ejkernel import callib
from ejkernel.types import Platform

# Cases whose programs are compiled before they are timed.
_TOGETHER = 4


@dataclass(frozen=True)
class Case:
    """One layer in one mode.

    Attributes:
        shape: the layer.
        mode: what of it is called.
        dtype: of its operands.
        contenders: who takes part.
        judge: makes the gate. It is called more than once.
        bounds: the largest errors that ours and that a rival may have.
        work: operations of a call, or bytes.
        unit: "TFLOP/s", or "TB/s" where bytes are the work.
    """

    shape: Any
    mode: str
    dtype: jnp.dtype
    contenders: Sequence[Contender]
    judge: Callable[[], Gate]
    bounds: tuple[float, float]
    work: float
    unit: str = "TFLOP/s"


def run(benchmark: str, cases: Sequence[Case], convention: str, arguments: argparse.Namespace) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    print(f"{jax.devices()[0].device_kind}; {convention}\nceilings")
    ceilings = callib.calibrate(tell=lambda line: print(f"  {line}"))
    rows, file = [], result_file(benchmark, arguments.out)
    for start in range(0, len(cases), _TOGETHER):
        some = cases[start : start + _TOGETHER]
        warmed([task for case in some for task in (case.judge, *(contender.warm for contender in case.contenders))])
        for case in some:
            rows += _measured(case, arguments.repeats)
            save(file, rows, ceilings, convention)
    print("", *means(rows), f"written: {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def _measured(case: Case, repeats: int) -> list[Row]:
    rows = measure(
        str(case.shape),
        case.mode,
        case.contenders,
        lambda results: case.judge()(results),
        bounds=case.bounds,
        work=case.work,
        yardstick=yardstick(None if case.unit == "TB/s" else case.dtype.name),
        repeats=repeats,
    )
    show(f"{case.shape}, {case.dtype}, {case.mode}", rows, case.unit)
    return rows


# --- The command line


def parser(description: str, shapes: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Of what every one of them is asked."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="what JAX prefers if not given")
    made.add_argument(
        "--shapes", type=lambda text: _shapes(text, shapes), metavar="NAME[@BxS],…", help=f"of {', '.join(shapes)}"
    )
    made.add_argument(
        "--platforms", type=chosen("platform", ("auto", *Platform)), default=["auto"], help="of ours: auto,triton,xla"
    )
    made.add_argument("--repeats", type=_count, default=11, help="batches of each contender")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    return made


def chosen(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an argument that names some of what is known, with commas between them."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"no such {what}: {name}; known are {', '.join(known)}")
        return text.split(",")

    return names


def started(arguments: argparse.Namespace, shapes: Mapping[str, Any], on_cpu: str) -> tuple[jnp.dtype, list[Any]]:
    """Which dtype and layers are measured on the device that was asked for, if it is not said: on a CPU few."""
    if arguments.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    backend = jax.default_backend()
    if arguments.device not in (None, backend):
        raise SystemExit(f"no {arguments.device} here: JAX runs on {backend}")
    dtype = jnp.dtype("float32" if backend == "cpu" else "bfloat16")
    return dtype, arguments.shapes or (_shapes(on_cpu, shapes) if backend == "cpu" else list(shapes.values()))


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _shapes(text: str, known: Mapping[str, Any]) -> list[Any]:
    """Named layers, each with @batch×length where it is to be another size than that of the table."""
    shapes = []
    for asked in text.split(","):
        name, _, size = asked.partition("@")
        batch, _, length = size.partition("x")
        if name not in known or (size and not (batch.isdecimal() and length.isdecimal())):
            raise argparse.ArgumentTypeError(f"{asked!r} is not a name, or name@BxS, of {', '.join(known)}")
        shapes.append(known[name].at(int(batch), int(length)) if size else known[name])
    return shapes
