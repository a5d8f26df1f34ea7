"""Compiles every TPU kernel with every config for all TPU generations: `python -m benchmarks.tpu_compile`.

`--generations v5e,v6e --operations gla` selects some of them. No TPU is needed.

It compiles the forward, the backward and the tangent of each operation, for each named shape and each config of its
space. Programs depend on features, options and blocks, but not on the numbers of sequences and heads: of shapes that
differ only in these, the first is compiled. A run takes hours on two cores; `--after FILE` compiles only the programs
that are not in that record.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS, types_of_call
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.types import Backend, OperationConfig, Platform, Target
from ejkernel.types.shapes import Shape, measured_operations, shapes_of

from ._records import RESULTS, save_record
from ._tpu_compiler import GENERATIONS, device

# The fields of a shape that change no program.
AMOUNTS = {"name", "batch", "heads", "kv_heads", "seq", "seq_q", "seq_k", "rows", "groups", "tokens", "sequences"}


@dataclass(frozen=True)
class Program:
    """A primitive of an operation on one generation, for a named shape and a config."""

    generation: str
    primitive: str
    shape: str
    config: OperationConfig

    def __str__(self) -> str:
        blocks = [
            size
            for name, size in asdict(self.config).items()
            if isinstance(size, int) and name not in ("num_warps", "priority")
        ]
        return f"{self.generation}-{self.primitive}-{self.shape}-" + "x".join(map(str, blocks))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles all programs and records the outcome of each; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", default=",".join(GENERATIONS))
    parser.add_argument("--operations", default=",".join(measured_on_tpus()))
    parser.add_argument("--after", type=Path, help="a record, which is completed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    file = chosen.after or chosen.out / f"tpu_compile-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}.json"
    known = {row["program"]: row["outcome"] for row in json.loads(file.read_text())["rows"]} if chosen.after else {}
    jax.config.update("jax_platforms", "cpu")
    for program in programs(chosen.generations.split(","), chosen.operations.split(",")):
        if str(program) not in known:
            known[str(program)] = said = outcome(program)
            print(program, said, flush=True)
            _save(file, known)
    failed = [name for name, said in known.items() if isinstance(said, str)]
    print(*failed, f"{len(known)} programs, {len(failed)} failed, written: {file}", sep="\n")
    return 1 if failed else 0


def measured_on_tpus() -> list[str]:
    """The operations with named calls whose three primitives have a kernel for TPUs."""

    def has_kernel(primitive: str) -> bool:
        of_tpu = Platform.PALLAS, Backend.TPU
        return any((x.platform, x.backend) == of_tpu for x in kernel_registry.list_implementations(primitive))

    of_trio = lambda operation: [operation, f"{operation}_jvp", f"{operation}_bwd"]
    return [operation for operation in measured_operations() if all(map(has_kernel, of_trio(operation)))]


def programs(generations: Sequence[str], operations: Sequence[str]) -> Iterator[Program]:
    """The distinct programs; for each call the heuristic config first."""
    found = {}
    for operation in operations:
        for name, shape in shapes_of(operation).items():
            x, spec = call(operation, shape)
            algorithm = OPERATIONS[operation].algorithm
            for primitive in (algorithm.forward, algorithm.backward, algorithm.tangent):
                for generation in generations:
                    implementation = kernel_registry.find(primitive.name, "pallas", "tpu").implementation
                    target = Target("tpu", GENERATIONS[generation].kind)
                    if implementation.supports(spec, x, target) is None:
                        for config in implementation.space(spec, x, target):
                            program = Program(generation, primitive.name, name, config)
                            kind = tuple((k, v) for k, v in asdict(shape).items() if k not in AMOUNTS)
                            found.setdefault(replace(program, shape=str(kind)), program)
    return iter(found.values())


def call(operation: str, shape: Shape) -> tuple[Any, Any]:
    """Operands without contents, in bfloat16, and the spec."""
    algorithm = OPERATIONS[operation].algorithm
    named, spec = types_of_call(operation, **shape.arguments("bfloat16"))
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    return algorithm.operands(**types), spec


def outcome(program: Program) -> float | str:
    """The seconds that the compiler took, or its error."""
    began = time.monotonic()
    try:
        compiled(program)
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())[:1000]
    return round(time.monotonic() - began, 2)


def compiled(program: Program) -> Any:
    """The executable of a program, by the TPU compiler."""
    operation = KERNELS[program.primitive].algorithm.name
    x, spec = call(operation, shapes_of(operation)[program.shape])
    return compiled_call(program.generation, program.primitive, x, spec, program.config)


def compiled_call(generation: str, primitive: str, x: Any, spec: Any, config: OperationConfig) -> Any:
    """The executable of a primitive, for everything that is differentiable among these operands."""
    algorithm, run = KERNELS[primitive].algorithm, kernel_registry.find(primitive, "pallas", "tpu").implementation
    forward = kernel_registry.find(algorithm.name, "pallas", "tpu").implementation
    out = jax.eval_shape(lambda *x: forward(*x, spec=spec, config=config), *x)
    wrt = tuple(
        n for n in algorithm.differentiable if (a := getattr(x, n)) is not None and jnp.issubdtype(a.dtype, jnp.inexact)
    )
    dx = type(x)(**{name: getattr(x, name) if name in wrt else None for name in x._fields})
    function, arguments = {
        algorithm.forward.name: (lambda x: run(*x, spec=spec, config=config), (x,)),
        algorithm.tangent.name: (lambda x, out, dx: run(x, out, dx, spec=spec, config=config), (x, out, dx)),
        algorithm.backward.name: (lambda x, out, do: run(x, out, do, wrt=wrt, spec=spec, config=config), (x, out, out)),
    }[primitive]
    on_core = jax.sharding.SingleDeviceSharding(device(generation))
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_core), arguments)
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def _save(file: Path, known: dict[str, float | str]) -> None:
    rows = [dict(program=name, outcome=said) for name, said in known.items()]
    save_record(
        file,
        "which configs the compilers of TPUs take",
        "seconds that the compiler took, or what it said",
        device="compilers of TPUs alone",
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
