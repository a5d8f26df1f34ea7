"""Measures the configs of calls and keeps the fastest: of recorded calls, or of a layer of a model.

    EJKERNEL_OPS_RECORD=calls.json python train.py && ejkernel tune --recorded calls.json
    ejkernel tune --model llama3-8b --sizes 4x4096,1x32768 --out llama3.json --processes 8
    ejkernel tune --merge a.json b.json --out all.json

The configs are added to this machine's cache file, from which programs read them, or to a table (--out), which can be
shipped, shared and merged. Each config is saved as soon as it is found.

Nearly all of the time on a GPU is compilation: --processes compiles several calls at once. One is measured at a time,
also beside other runs of this command on the device. A call that fails beside others is measured again alone.
"""

import argparse
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .. import lax
from ..errors import short_type
from ..modules._operation import OPERATIONS
from ..modules._primitive_kernel import PrimitiveKernel
from ..ops import Invocation, PersistentCache, load_invocations, merge_tables, policy_override, recording
from ..ops.registry import Calls
from ..ops.utils.operands import is_array
from ..ops.utils.shared_file import SharedFile
from ..types.shapes import Shape, measured_operations, shape_named, shapes_of
from ._arguments import positive
from ._measured import Result, how_many_processes, measured_calls
from ._progress import progress
from ._table import print_table

_TANGENT = "_jvp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The calls to tune, the selection of operations, and the file for the configs."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recorded", nargs="+", type=Path, metavar="FILE", help="files of EJKERNEL_OPS_RECORD")
    names = [name for operation in measured_operations() for name in shapes_of(operation)]
    listed = ", ".join(names).replace("%", "%%")
    what.add_argument("--model", choices=names, metavar="NAME", help=f"one of {listed}")
    what.add_argument("--merge", nargs="+", type=Path, metavar="TABLE", help="measure nothing, only merge tables")
    model = parser.add_argument_group("with --model")
    model.add_argument(
        "--sizes",
        type=_sizes,
        metavar="BxS,…",
        help="batches and lengths, if the layer has them; by default its own and two around them",
    )
    model.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="dtype of its arrays"
    )
    recorded = parser.add_argument_group("with --recorded")
    recorded.add_argument(
        "--import",
        dest="modules",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules to import that register kernels",
    )
    parser.add_argument("--operations", metavar="NAME,…", help=f"by default all except tangents ({_TANGENT})")
    parser.add_argument("--out", type=Path, metavar="TABLE", help="a table, instead of this machine's cache file")
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="calls that are compiled at once, each in a process with its own values on the device; by default 1",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the calls without measuring them")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table of what was tuned; 1 if there was nothing, or a call could not be measured."""
    try:
        return _merge(arguments) if arguments.merge else _tune(arguments)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise argparse.ArgumentError(None, str(error)) from error


def _merge(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        raise ValueError("--merge needs --out")
    print(f"{merge_tables(arguments.merge, arguments.out)} configs added to {arguments.out}")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    if arguments.processes != 1:  # before this process has a GPU, of which JAX would take most of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    calls = _chosen(arguments.operations, _calls(arguments))
    if not calls:
        print("there is nothing to tune")
        return 1
    if arguments.dry_run:
        print_table(("operation", "configs", "call"), [_planned(inv) for inv in calls])
        return 0
    table = SharedFile(arguments.out or PersistentCache().path_of())
    table.add({})  # raises now, rather than after the first measurement, if it cannot be written
    processes = how_many_processes(arguments.processes, len(calls))
    show, found = progress("tune", len(calls), every=1), {}
    with closing(measured_calls(calls, processes, arguments.modules)) as results:
        for index, result in results:
            if result.entry:
                table.add(result.entry)
            found[index] = result
            show(len(found), calls[index].kernel.name)
    rows = [_row(inv, found[index]) for index, inv in enumerate(calls)]
    print_table(("operation", "ms", "heuristic", "gain", "config", "call"), rows)
    print(f"kept in {table.path}")
    return int(any(not result.entry for result in found.values()))


# --- Which calls


def _calls(arguments: argparse.Namespace) -> list[Invocation]:
    if arguments.model:
        operation, shape = shape_named(arguments.model)
        shapes = [shape.at(*size) for size in _sizes_of(arguments, shape)] or [shape]
        return [inv for shape in shapes for inv in calls_of_shape(operation, shape, arguments.dtype)]
    for module in arguments.modules:
        importlib.import_module(module)
    calls: dict[tuple[str, str], Invocation] = {}
    for path in arguments.recorded:
        calls |= {(inv.kernel.op_id, inv.call_key): inv for inv in _invocations(load_invocations(path))}
    return list(calls.values())


def _invocations(calls: Mapping[str, Calls]) -> list[Invocation]:
    return [Invocation(*call) for of_operation in calls.values() for call in of_operation.values()]


def _sizes_of(arguments: argparse.Namespace, shape: Shape) -> list[tuple[int, int]]:
    """The sizes asked for; or the shape's own, and half and double its length with about as many tokens."""
    batch, length = getattr(shape, "batch", None), getattr(shape, "seq_q", getattr(shape, "seq", None))
    if batch is None:
        if arguments.sizes:
            raise ValueError(f"{shape.name} has no batch and length that --sizes could change")
        return []
    return arguments.sizes or [(batch, length), (2 * batch, length // 2), (max(batch // 2, 1), 2 * length)]


def calls_of_shape(operation: str, shape: Shape, dtype: str, platform: str | None = None) -> list[Invocation]:
    """The calls that a gradient of the layer makes: forward, tangent and backward, or forward if it has no derivative.

    `platform` ("triton", …) selects the kernels; by default the library chooses them.
    """
    arguments = shape.arguments(dtype)
    call = partial(getattr(lax, operation), config=None if platform is None else dict(platform=platform))
    inexact = {name for name in OPERATIONS[operation].algorithm.differentiable if name in arguments}
    arrays = {name: x for name, x in arguments.items() if name in shape.sizes}
    wrt = {name: x for name, x in arrays.items() if name in inexact}
    rest = {name: x for name, x in arrays.items() if name not in inexact}

    def total(wrt: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
        return call(**wrt, **rest, **shape.options).astype(jnp.float32).sum()

    with recording() as calls, _heuristics():
        jax.eval_shape(jax.grad(total) if wrt else total, wrt, rest)
    return _invocations(calls)


@contextmanager
def _heuristics() -> Iterator[None]:
    """A context in which configs come from heuristics, whatever autotuning policy the environment sets."""
    asked = os.environ.pop("EJKERNEL_AUTOTUNE_POLICY", None)
    try:
        with policy_override(autotune=False):
            yield
    finally:
        if asked is not None:
            os.environ["EJKERNEL_AUTOTUNE_POLICY"] = asked


def _chosen(names: str | None, calls: Sequence[Invocation]) -> list[Invocation]:
    if names is None:
        return [inv for inv in calls if not inv.kernel.name.endswith(_TANGENT)]
    known, asked = {inv.kernel.name for inv in calls}, names.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"no call of {', '.join(unknown)}; there are {', '.join(sorted(known)) or 'none at all'}")
    return [inv for inv in calls if inv.kernel.name in asked]


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = [size.partition("x")[::2] for size in text.split(",")]
    if not all(batch.isdecimal() and length.isdecimal() and int(batch) and int(length) for batch, length in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of batches and lengths such as 4x4096,1x32768")
    return [(int(batch), int(length)) for batch, length in sizes]


# --- Output


def _row(inv: Invocation, result: Result) -> tuple[str, ...]:
    name, call = inv.kernel.name, _described(inv)
    if not result.entry:
        return name, "", "", "", f"not measured: {result.reason}", call
    heuristic, gain = "failed", ""
    if result.heuristic is not None:
        heuristic, gain = f"{result.heuristic:.4f}", f"{result.heuristic / result.milliseconds:.2f} ×"
    return name, f"{result.milliseconds:.4f}", heuristic, gain, result.config, call


def _planned(inv: Invocation) -> tuple[str, ...]:
    try:
        configs = str(len({inv.kernel.heuristic_cfg(inv), *inv.kernel.config_space(inv)}))
    except Exception as error:
        configs = " ".join(str(error).split())
    return inv.kernel.name, configs, _described(inv)


def _described(inv: Invocation) -> str:
    """The types of the arrays, each once, and the options."""
    types = dict.fromkeys(short_type(x) for x in jax.tree.leaves((inv.args, inv.kwargs)) if is_array(x))
    if isinstance(inv.kernel, PrimitiveKernel):
        return " ".join((*types, repr(inv.kwargs["spec"])))
    return " ".join((*types, *(f"{name}={x!r}" for name, x in inv.kwargs.items() if not is_array(x))))
