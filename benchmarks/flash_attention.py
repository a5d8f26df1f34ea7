"""Flash attention beside its rivals: `python benchmarks/flash_attention.py --device gpu --modes fwd,fwd_bwd,jvp`.

Every contender is judged against the formula in float64 before it is timed. Programs are compiled before, those of
some cases side by side. The release on PyPI takes part if EJKERNEL_RELEASE names a folder that holds it and what it
imports, which runs in a process of its own. The table, and the record of it under benchmarks/results/, give the median
time of a call, TFLOP/s, the share of the rate of matrix products measured in the same run, and how many times faster
than the best rival it is.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

# torch needs room on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
from _attention import CONVENTION, WORK, gate, inputs, operations
from _attention_rivals import contenders
from _harness import RESULTS, Contender, Gate, Row, means, measure, result_file, save, show, warmed

from ejkernel import callib
from ejkernel.types import ATTENTION_SHAPES, AttentionShape, Platform

# The largest error of ours, of ours in derivatives, and of a rival, in units of that of the formula in the same dtype.
_FORWARD, _DERIVATIVE, _RIVAL = 2.0, 3.0, 10.0
# Cases whose programs are compiled before they are timed.
_TOGETHER = 8
_ON_CPU = "llama3-8b@1x512,gpt-oss-local@1x512,bert-large@1x512"


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    arguments = _arguments(argv)
    if arguments.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if arguments.device and jax.default_backend() != arguments.device:
        raise SystemExit(f"no {arguments.device} here: JAX runs on {jax.default_backend()}")
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype(arguments.dtype or ("float32" if on_cpu else "bfloat16"))
    shapes = arguments.shapes or (_shapes(_ON_CPU) if on_cpu else list(ATTENTION_SHAPES.values()))
    print(f"{jax.devices()[0].device_kind}, {dtype}; FLOPs: {CONVENTION}\nceilings")
    ceilings = callib.calibrate(tell=lambda line: print(f"  {line}"))
    rows, file = [], result_file("flash_attention", arguments.out)
    cases = [case for shape in shapes for case in _cases(shape, dtype, arguments)]
    for start in range(0, len(cases), _TOGETHER):
        some = cases[start : start + _TOGETHER]
        warmed([task for case in some for task in (case.judge, *(contender.warm for contender in case.contenders))])
        for case in some:
            rows += _measured(case, dtype, ceilings, arguments.repeats)
            save(file, rows, ceilings, CONVENTION)
    print("", *means(rows), f"written: {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


@dataclass(frozen=True)
class _Case:
    shape: AttentionShape
    mode: str
    contenders: list[Contender]
    judge: Callable[[], Gate]


def _cases(shape: AttentionShape, dtype, arguments: argparse.Namespace) -> list[_Case]:
    """A case for each mode, on the same arrays."""
    given = inputs(shape, dtype)
    wanted = lambda contender: contender.ours or arguments.rivals is None or contender.name in arguments.rivals
    everyone = {mode: contenders(shape, mode, given, arguments.platforms) for mode in arguments.modes}
    return [
        _Case(shape, mode, list(filter(wanted, known)), cache(partial(gate, shape, mode, given)))
        for mode, known in everyone.items()
    ]


def _measured(case: _Case, dtype, ceilings, repeats: int) -> list[Row]:
    rows = measure(
        str(case.shape),
        case.mode,
        case.contenders,
        lambda results: case.judge()(results),
        bounds=(_FORWARD if case.mode == "fwd" else _DERIVATIVE, _RIVAL),
        operations=operations(case.shape, case.mode),
        ceiling=ceilings.matmul[dtype.name],
        repeats=repeats,
    )
    show(f"{case.shape}, {dtype}, {case.mode}", rows)
    return rows


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="what JAX prefers if not given")
    parser.add_argument("--modes", type=_modes, default=["fwd", "fwd_bwd", "jvp"], help=f"of {', '.join(WORK)}")
    parser.add_argument("--shapes", type=_shapes, metavar="NAME[@BxS],…", help=f"of {', '.join(ATTENTION_SHAPES)}")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="float32 on a CPU, bfloat16 elsewhere"
    )
    parser.add_argument("--platforms", type=_platforms, default=["auto"], help="of ours, e.g. auto,triton,xla")
    parser.add_argument("--rivals", type=lambda text: text.split(","), help="e.g. 'jax.nn cudnn,torch cudnn'; or all")
    parser.add_argument("--repeats", type=_count, default=11, help="batches of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _modes(text: str) -> list[str]:
    return _chosen(text, WORK, "mode")


def _platforms(text: str) -> list[str]:
    return _chosen(text, ("auto", *Platform), "platform")


def _chosen(text: str, known, what: str) -> list[str]:
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"no such {what}: {name}; known are {', '.join(known)}")
    return text.split(",")


def _shapes(text: str) -> list[AttentionShape]:
    """Names of shapes, each with @batch×length where it is to be another size than that of the table."""
    shapes = []
    for asked in text.split(","):
        name, _, size = asked.partition("@")
        batch, _, length = size.partition("x")
        if name not in ATTENTION_SHAPES or (size and not (batch.isdecimal() and length.isdecimal())):
            raise argparse.ArgumentTypeError(f"{asked!r} is not a name, or name@BxS, of {', '.join(ATTENTION_SHAPES)}")
        shape = ATTENTION_SHAPES[name]
        shapes.append(shape.at(int(batch), int(length)) if size else shape)
    return shapes


if __name__ == "__main__":
    sys.exit(main())
