"""Flash attention beside its rivals: `python benchmarks/flash_attention.py --device gpu --modes fwd,fwd_bwd,jvp`.

Every contender is judged against the formula in float64 before it is timed. Programs are compiled before, those of
some cases side by side. The release on PyPI takes part if EJKERNEL_RELEASE names a folder that holds it and what it
imports, and this library as it was if EJKERNEL_BEFORE does (`pip install --target`), each in a process of its own. The
table, and the record of it under benchmarks/results/, give the median time of a call, TFLOP/s, the share of the rate of
matrix products interleaved with it, and how many times faster than the best rival it is.
"""

import argparse
import os
import sys
from functools import cache, partial

# torch needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax.numpy as jnp
from _attention import CONVENTION, WORK, gate, inputs, operations
from _attention_rivals import contenders
from _cases import Case, chosen, parser, run, started

from ejkernel.types import ATTENTION_SHAPES, AttentionShape

# The largest error of ours, of ours in derivatives, and of a rival, in units of that of the formula in the same dtype.
_FORWARD, _DERIVATIVE, _RIVAL = 2.0, 3.0, 10.0
_ON_CPU = "llama3-8b@1x512,gpt-oss-local@1x512,bert-large@1x512"


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    arguments = _arguments(argv)
    dtype, shapes = started(arguments, ATTENTION_SHAPES, _ON_CPU)
    dtype = jnp.dtype(arguments.dtype or dtype)
    return run("flash_attention", [case for s in shapes for case in _cases(s, dtype, arguments)], CONVENTION, arguments)


def _cases(shape: AttentionShape, dtype: jnp.dtype, arguments: argparse.Namespace) -> list[Case]:
    """A case for each mode, on the same arrays."""
    given = inputs(shape, dtype)
    wanted = lambda contender: contender.ours or arguments.rivals is None or contender.name in arguments.rivals
    return [
        Case(
            shape,
            mode,
            dtype,
            list(filter(wanted, contenders(shape, mode, given, arguments.platforms))),
            cache(partial(gate, shape, mode, given)),
            bounds=(_FORWARD if mode == "fwd" else _DERIVATIVE, _RIVAL),
            work=operations(shape, mode),
        )
        for mode in arguments.modes
    ]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    ours = parser(__doc__, ATTENTION_SHAPES)
    ours.add_argument("--modes", type=chosen("mode", WORK), default=["fwd", "fwd_bwd", "jvp"], help=", ".join(WORK))
    ours.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="float32 on a CPU, bfloat16 elsewhere"
    )
    ours.add_argument("--rivals", type=lambda text: text.split(","), help="e.g. 'jax.nn cudnn,torch cudnn'; or all")
    return ours.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
