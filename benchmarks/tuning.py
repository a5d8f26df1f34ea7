"""How near the tuner comes to the best config: `python benchmarks/tuning.py --shapes llama3-8b,h16-d64`.

For each shape, and each of forward and backward, the tuner searches the config space as it does for users. Then every
config of the space is timed at length, interleaved with the others. The time of the config that was found, and that of
the heuristic one, over that of the best are the table and the record under benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _harness import RESULTS, interleaved, queued, result_file

import ejkernel
from ejkernel.cli.info import versions
from ejkernel.ops import Invocation, Tuner, policy_override
from ejkernel.ops.utils.serialization import pack
from ejkernel.ops.utils.shared_file import SharedFile
from ejkernel.types import ATTENTION_SHAPES, AttentionShape

# The config that is found may take this much longer than the best one.
BAR = 1.03


@dataclass(frozen=True)
class Row:
    """Of one call: how many configs were timed, and milliseconds of the best, the found and the heuristic one."""

    shape: str
    operation: str
    configs: int
    best: float
    found: float
    heuristic: float
    best_config: str
    found_config: str


def main(argv: list[str] | None = None) -> int:
    """Measures all shapes and saves them; 1 where the tuner missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b,h16-d64", help=f"of {', '.join(ATTENTION_SHAPES)}")
    parser.add_argument("--operations", default="flash_attention,flash_attention_bwd", help="also flash_attention_jvp")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15, help="batches of each config")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--table", type=Path, help="a table that the configs which are found are added to")
    arguments = parser.parse_args(argv)
    rows, file = [], result_file("tuning", arguments.out)
    print(f"{'':<44}{'configs':>8}{'best':>10}{'found':>10}{'heuristic':>10}")
    for name in arguments.shapes.split(","):
        for inv in calls(ATTENTION_SHAPES[name], jnp.dtype(arguments.dtype)):
            if inv.kernel.name in arguments.operations.split(","):
                found = Tuner().fastest(inv.kernel, inv)
                if arguments.table:
                    SharedFile(arguments.table).add({inv.kernel.key_builder(inv): pack(found)})
                rows.append(row := measured(name, inv, found, arguments.repeats))
                ratios = f"{row.found / row.best:>9.3f}×{row.heuristic / row.best:>9.3f}×"
                print(f"{f'{name} {row.operation}':<44}{row.configs:>8}{row.best:>7.3f} ms{ratios}", flush=True)
                save(file, rows, arguments.repeats)
    print(f"written: {file}")
    return int(any(row.found > BAR * row.best for row in rows))


def calls(shape: AttentionShape, dtype: Any) -> list[Invocation]:
    """The calls that a gradient of this attention makes."""
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32 if n == "sinks" else dtype) for n, s in shape.sizes.items()}
    attention = lambda x: ejkernel.lax.flash_attention(**x, **shape.options).astype(jnp.float32).sum()
    with ejkernel.ops.recording() as recorded, policy_override(autotune=False):
        jax.eval_shape(jax.grad(attention), arrays)
    return [Invocation(*call) for of in recorded.values() for call in of.values()]


def measured(name: str, inv: Invocation, found: Any, repeats: int) -> Row:
    """What the tuner found, and what it could have found."""
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
    return Row(name, kernel.name, len(ms), ms[best], ms[found], ms[heuristic], repr(best), repr(found))


def program(kernel: Any, args: tuple, kwargs: dict[str, Any], config: Any) -> Callable[..., Any] | None:
    """The call with a config, compiled; None where that cannot be done."""
    try:
        return jax.jit(lambda *args: kernel.bind(args, kwargs, config)).lower(*args).compile()
    except Exception as error:
        print(f"  {config}: {str(error).splitlines()[0][:100]}")
        return None


def save(file: Path, rows: list[Row], repeats: int) -> None:
    """Writes the rows so far."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "convention": f"milliseconds of a call, median of {repeats} batches, interleaved",
        "rows": [asdict(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
