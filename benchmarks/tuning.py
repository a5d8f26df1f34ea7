"""Compares the tuner's config with the best one: `python -m benchmarks.tuning --shapes llama3-8b,h16-d64`.

For each named call of any operation, forward, backward and, if requested, tangent, the tuner searches the config space
as it does for users. Then every config of the space is timed for longer, interleaved with the others. The table has the
times of the tuner's config and of the heuristic one, relative to the best; the record in benchmarks/results/ has the
times of all configs. `--platform triton` selects the kernels of that platform.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from ejkernel.cli.tune import calls_of_shape
from ejkernel.ops import Invocation, Tuner
from ejkernel.ops.utils.serialization import pack
from ejkernel.ops.utils.shared_file import SharedFile
from ejkernel.types import Platform
from ejkernel.types.shapes import shape_named

from ._harness import interleaved, queued
from ._records import RESULTS, result_file, save_record

# The largest allowed time of the tuner's config, relative to the best.
BAR = 1.03
EVIDENCE = "what the tuner finds beside every config"


@dataclass(frozen=True)
class Row:
    """A call: milliseconds of the best config, of the tuner's and the heuristic one, and of all configs by name."""

    shape: str
    operation: str
    best: float
    found: float
    heuristic: float
    best_config: str
    found_config: str
    configs: dict[str, float]


def main(argv: list[str] | None = None) -> int:
    """Measures all shapes and writes the record; 1 if the tuner missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b,h16-d64", help="names in ejkernel/types/shapes")
    parser.add_argument("--tangents", action="store_true", help="measure them, too")
    parser.add_argument("--platform", choices=list(map(str, Platform)), help="of the kernels, if not to be chosen")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15, help="batches of each config")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--table", type=Path, help="a table that the configs which are found are added to")
    arguments = parser.parse_args(argv)
    rows, file = [], result_file("tuning", arguments.out)
    convention = f"milliseconds of a call, median of {arguments.repeats} batches, interleaved"
    print(f"{'':<44}{'configs':>8}{'best':>10}{'found':>10}{'heuristic':>10}")
    for name in arguments.shapes.split(","):
        for inv in calls_of_shape(*shape_named(name), arguments.dtype, arguments.platform):
            if arguments.tangents or not inv.kernel.name.endswith("_jvp"):
                found = Tuner().fastest(inv.kernel, inv)
                if arguments.table:
                    SharedFile(arguments.table).add({inv.kernel.key_builder(inv): pack(found)})
                rows.append(row := measured(name, inv, found, arguments.repeats))
                ratios = f"{row.found / row.best:>9.3f}×{row.heuristic / row.best:>9.3f}×"
                print(f"{f'{name} {row.operation}':<44}{len(row.configs):>8}{row.best:>7.3f} ms{ratios}", flush=True)
                save_record(
                    file, "what the tuner finds beside every config", convention, rows=[asdict(row) for row in rows]
                )
    print(f"written: {file}")
    return int(any(row.found > BAR * row.best for row in rows))


def measured(name: str, inv: Invocation, found: Any, repeats: int) -> Row:
    """The row of a call, with the tuner's config and all others."""
    kernel = inv.kernel
    heuristic = kernel.heuristic_cfg(inv)
    args, kwargs = kernel.synthetic_inputs(inv)
    configs = list(dict.fromkeys([heuristic, *kernel.config_space(inv)]))
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        programs = dict(
            zip(configs, compilers.map(lambda config: program(kernel, args, kwargs, config), configs), strict=True)
        )
    times = interleaved({config: queued(run, *args) for config, run in programs.items() if run}, repeats)
    ms = {config: statistics.median(of) * 1e3 for config, of in times.items() if not isinstance(of, Exception)}
    best = min(ms, key=ms.get)
    times = {repr(config): milliseconds for config, milliseconds in ms.items()}
    return Row(name, kernel.name, ms[best], ms[found], ms[heuristic], repr(best), repr(found), times)


def program(kernel: Any, args: tuple, kwargs: dict[str, Any], config: Any) -> Callable[..., Any] | None:
    """The call compiled with a config; None if that fails."""
    try:
        return jax.jit(lambda *args: kernel.bind(args, kwargs, config)).lower(*args).compile()
    except Exception as error:
        print(f"  {config}: {str(error).splitlines()[0][:100]}")
        return None


if __name__ == "__main__":
    sys.exit(main())
