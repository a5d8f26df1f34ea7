"""The time of the first call of a process, with and without caches: `python -m benchmarks.first_call`.

A call is the gradient of flash_attention in bfloat16. Three processes make it, one after the other: "cold" has empty
caches and does not tune, "tuned" has empty caches and the defaults, which tune the forward and the backward at their
first call, and "warm" is the next process with the caches of "tuned", this library's and JAX's compilation cache.
`added` is the total time that tuning adds to a first call. One more "cold" before them does not count, and leaves the
bytecode of modules, as pip does where it installs them.

Prints the seconds of each part and writes a record. Exits with 1 if a bar is not met or a case is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ._records import RESULTS, result_file, save_record

GROUPED = dict(batch=2, length=4096, heads=32, kv_heads=8, head_dim=128, value_dim=128)
GEMMA = dict(batch=1, length=8192, heads=32, kv_heads=16, head_dim=128, value_dim=128)
CASES = {
    "plain": dict(sizes=GROUPED, options=dict(causal=True), segments=0),
    "segments": dict(sizes=GROUPED, options=dict(causal=True), segments=4),
    "gemma": dict(sizes=GEMMA, options=dict(causal=True, window=(4095, 0), softcap=50.0), segments=0),
    "72": dict(sizes=GROUPED | dict(heads=16, kv_heads=16, head_dim=72, value_dim=72), options={}, segments=0),
    "192/128": dict(sizes=GROUPED | dict(heads=16, kv_heads=16, head_dim=192), options=dict(causal=True), segments=0),
}
"""The arguments of the gradient; `segments` is their number in a sequence, 0 for none."""
PARTS = ("trace", "lower", "compile", "run")
MOST_ADDED, MOST_LOWERED, MOST_COMPILED, MOST_WARM = 3.0, 1.5, 3.0, 0.5
LINE = (
    "{what:<18} start {start:6.2f}   tuning {tuning:5.2f} ({searches})   trace {trace:6.3f}   lower {lower:6.3f}   "
    "compile {compile:6.3f}   run {run:6.3f}"
)
CONVENTION = (
    "Seconds. cold: empty caches, EJKERNEL_AUTOTUNE_POLICY=heuristics; tuned: empty caches, the defaults; warm: the "
    "next process, with this library's and JAX's compilation cache. Modules have bytecode. start: until JAX has its "
    "devices; tuning: within trace, which does not count it, in that many searches; added: by which tuned is longer "
    "than cold, without start. "
    f"Bars: added {MOST_ADDED:g} for each search, trace and lower {MOST_LOWERED:g}, compile {MOST_COMPILED:g}, and all "
    f"of it when warm {MOST_WARM:g}"
)


def main() -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--length", type=int, help="of sequences, where not that of the case")
    parser.add_argument("--seconds", type=float, default=75, help="after which no further case is begun")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    given = parser.parse_args()
    if unknown := set(given.only) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    rows, left_out, began = [], [], time.monotonic()
    for name in given.only or CASES:
        case = CASES[name]
        sizes = case["sizes"] | ({"length": given.length} if given.length else {})
        try:
            if time.monotonic() - began > given.seconds:
                raise TimeoutError(f"not begun after {given.seconds:g} s")
            rows += (of_case := measured(name, case | dict(sizes=sizes)))
        except (TimeoutError, subprocess.SubprocessError) as reason:
            left_out.append(name)
            print(f"{name}: {str(reason)[-300:]}", flush=True)
            continue
        for row in of_case:
            print(LINE.format(**row) + "".join(f"   {over}" for over in row["over"]), flush=True)
    if not rows:
        return 1
    file = result_file("first_call", given.out)  # which needs the device, after the processes of the cases have ended
    evidence = "seconds of the first call of a process, with and without tuning, and of the second with caches"
    save_record(file, evidence, CONVENTION, cores=os.cpu_count(), rows=rows)
    print(f"kept in {file}, after {time.monotonic() - began:.0f} s")
    return int(bool(left_out) or any(row["over"] for row in rows))


def measured(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each process of a case."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode = dict(PYTHONPYCACHEPREFIX=f"{folder}/bytecode", PYTHONDONTWRITEBYTECODE="")
        for caches in ("first", "empty"):
            cold = process(case, f"{folder}/{caches}", EJKERNEL_AUTOTUNE_POLICY="heuristics", **bytecode)
        tuned, warm = (process(case, f"{folder}/kept", **bytecode) for _ in range(2))
    tuned["added"] = sum(tuned[part] - cold[part] for part in ("tuning", *PARTS))
    rows = dict(cold=cold, tuned=tuned, warm=warm)
    return [dict(what=f"{kind}, {name}", shape=name) | row | dict(over=over(kind, row)) for kind, row in rows.items()]


def over(kind: str, row: dict[str, Any]) -> list[str]:
    """The bars that the row exceeds."""
    lowered = row["trace"] + row["lower"]
    bars = {
        "cold": dict(lower=(lowered, MOST_LOWERED), compile=(row["compile"], MOST_COMPILED)),
        "tuned": dict(added=(row.get("added", 0), MOST_ADDED * max(row["searches"], 1))),
        "warm": dict(both=(row["tuning"] + lowered + row["compile"], MOST_WARM)),
    }[kind]
    return [f"{bar}: {seconds:.2f} s over {most:g} s" for bar, (seconds, most) in bars.items() if seconds > most]


def process(case: dict[str, Any], caches: str, **environment: str) -> dict[str, Any]:
    """The times that a new process measures of its first call, with the caches of a folder."""
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("EJKERNEL_", "JAX_COMPILATION_"))}
    own = dict(
        EJKERNEL_CACHE_DIR=f"{caches}/ejkernel",
        JAX_COMPILATION_CACHE_DIR=f"{caches}/jax",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    ran = subprocess.run(
        [sys.executable, "-m", f"{__package__}._first_call", json.dumps(case | dict(began=time.time()))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        env=inherited | own | environment,
    )
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
