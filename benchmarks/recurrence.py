"""The linear recurrence beside flash-linear-attention: `python benchmarks/recurrence.py --device gpu`.

Every contender is judged against the formula in float64 before it is timed. Our programs are compiled before, those of
some cases side by side; flash-linear-attention tries its configs when it is called first. The table, and the record of
it under benchmarks/results/, give the median time of a call, TFLOP/s, and how many times faster than the rival it is. A
shape of one token (`gla-h16-d128@256x1`) is a step of decoding: its TB/s are of the state, beside the bandwidth of a
copy.
"""

import os
import sys
from functools import cache, partial

# torch needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax.numpy as jnp
from _cases import Case, parser, run, started
from _recurrence import CONVENTION, contenders, gate, inputs, modes, work

from ejkernel.types import RECURRENCE_SHAPES, RecurrenceShape

# The largest error of ours and of a rival, in units of that of rounding the exact result; in float32 sums err more.
_OURS, _RIVAL, _IN_FLOAT32 = 3.0, 10.0, 30.0
_ON_CPU = "lightning-h16-d128@1x512,gla-h16-d128@1x256,retention-h16-d128@1x512,gla-h16-d128@8x1"


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    arguments = parser(__doc__, RECURRENCE_SHAPES).parse_args(argv)
    dtype, shapes = started(arguments, RECURRENCE_SHAPES, _ON_CPU)
    cases = [_case(shape, mode, dtype, arguments.platforms) for shape in shapes for mode in modes(shape)]
    return run("recurrence", cases, CONVENTION, arguments)


def _case(shape: RecurrenceShape, mode: str, dtype: jnp.dtype, platforms: list[str]) -> Case:
    given = inputs(shape, mode, dtype)
    return Case(
        shape,
        mode,
        dtype,
        contenders(shape, mode, given, platforms),
        cache(partial(gate, shape, mode, given)),
        bounds=(_OURS if dtype == jnp.bfloat16 else _IN_FLOAT32, _RIVAL),
        work=work(shape, mode),
        unit="TB/s" if mode == "step" else "TFLOP/s",
    )


if __name__ == "__main__":
    sys.exit(main())
