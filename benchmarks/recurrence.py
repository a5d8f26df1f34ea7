"""The linear recurrence beside flash-linear-attention: `python benchmarks/recurrence.py --device gpu`.

Every contender is judged against the formula in float64 before it is timed. The table, and the record of it under
benchmarks/results/, give the median time of a call, TFLOP/s, and how many times faster than the rival it is. A shape of
one token (`gla-h16-d128@256x1`) is a step of decoding: its TB/s are of the state, beside the bandwidth of a copy.
"""

import argparse
import os
import sys
from functools import cache
from pathlib import Path

# torch needs room on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
from _harness import RESULTS, Row, means, measure, result_file, save, show
from _recurrence import CONVENTION, contenders, gate, inputs, modes, work

from ejkernel import callib
from ejkernel.types import RECURRENCE_SHAPES, RecurrenceShape

# The largest error of ours and of a rival, in units of that of rounding the exact result; in float32 sums err more.
_OURS, _RIVAL, _IN_FLOAT32 = 3.0, 10.0, 30.0
_ON_CPU = "lightning-h16-d128@1x512,gla-h16-d128@1x256,retention-h16-d128@1x512,gla-h16-d128@8x1"


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    arguments = _arguments(argv)
    if arguments.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if arguments.device and jax.default_backend() != arguments.device:
        raise SystemExit(f"no {arguments.device} here: JAX runs on {jax.default_backend()}")
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype("float32" if on_cpu else "bfloat16")
    shapes = arguments.shapes or (_shapes(_ON_CPU) if on_cpu else list(RECURRENCE_SHAPES.values()))
    ceilings = callib.calibrate(tell=lambda line: print(f"  {line}"))
    rows, file = [], result_file("recurrence", arguments.out)
    for shape in shapes:
        for mode in modes(shape):
            rows += _case(shape, mode, dtype, ceilings, arguments)
            save(file, rows, ceilings, CONVENTION)
    print("", *means(rows), f"written: {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def _case(shape: RecurrenceShape, mode: str, dtype, ceilings, arguments: argparse.Namespace) -> list[Row]:
    given = inputs(shape, mode, dtype)
    judge = cache(lambda: gate(shape, mode, given))
    rows = measure(
        str(shape),
        mode,
        contenders(shape, mode, given, arguments.platforms.split(",")),
        lambda results: judge()(results),
        bounds=(_OURS if dtype == jnp.bfloat16 else _IN_FLOAT32, _RIVAL),
        operations=work(shape, mode),
        ceiling=ceilings.copy if mode == "step" else ceilings.matmul[dtype.name],
        repeats=arguments.repeats,
    )
    show(f"{shape}, {dtype}, {mode}", rows, "TB/s" if mode == "step" else "TFLOP/s")
    return rows


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="what JAX prefers if not given")
    parser.add_argument("--shapes", type=_shapes, metavar="NAME[@BxS],…", help=f"of {', '.join(RECURRENCE_SHAPES)}")
    parser.add_argument("--platforms", default="auto", help="of ours, e.g. auto,triton,xla")
    parser.add_argument("--repeats", type=int, default=11, help="batches of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    return parser.parse_args(argv)


def _shapes(text: str) -> list[RecurrenceShape]:
    """Names of shapes, each with @batch×length where it is to be another size than that of the table."""
    shapes = []
    for asked in text.split(","):
        name, _, size = asked.partition("@")
        batch, _, length = size.partition("x")
        if name not in RECURRENCE_SHAPES or (size and not (batch.isdecimal() and length.isdecimal())):
            raise argparse.ArgumentTypeError(f"{asked!r} is not a name, or name@BxS, of {', '.join(RECURRENCE_SHAPES)}")
        shapes.append(RECURRENCE_SHAPES[name].at(int(batch), int(length)) if size else RECURRENCE_SHAPES[name])
    return shapes


if __name__ == "__main__":
    sys.exit(main())
