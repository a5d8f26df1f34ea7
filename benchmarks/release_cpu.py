"""Operations of EasyDeL's models beside ejkernel 0.0.78 on a CPU: `python -m benchmarks.release_cpu`.

EJKERNEL_RELEASE_PYTHON is the Python of an environment with the release; EJKERNEL_CLIENT_PYTHON is one with the JAX
that clients of this library run, by default this one. Both make the same calls, in the form of the release, in one
process each (`_release_calls`), alternately. If the release has several ways to compute a call, its fastest counts.
Results are compared with the call of this library in float64: a row has the errors of both.

Prints a table, writes a record, and exits with 1 if this library is slower, or its error more than twice as large.
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

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from ._bars import Row, conclude
from ._harness import Unavailable
from ._records import RESULTS

PROGRAM = Path(__file__).with_name("_release_calls.py")
BATCH_SECONDS = 0.05
FEATURES = dict(heads=4, features=128)
MAMBA, MAMBA_2 = dict(channels=1536, features=16), dict(heads=24, head_dim=64, features=128)
PAGES = dict(context=511, heads=8, kv_heads=2, features=64, page=16)
TURBOQUANT = ("ragged_page_attention_v2_turboquant", "ragged_page_attention_v3_turboquant")
MODES = (
    *(dict(mode="affine", bits=bits, group_size=64) for bits in (1, 2, 4, 8)),
    *(dict(mode=mode) for mode in ("nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8")),
)
# Layers of Qwen3-Next with 4 of its 32 heads, of Mamba 130m and Mamba-2 130m, and a product of Qwen3 0.6B.
TRAINED = (
    ("gated_delta_rule", dict(batch=1, length=1024, **FEATURES)),
    ("state_space_v1", dict(batch=1, length=512, **MAMBA)),
    ("state_space_v2", dict(batch=1, length=512, **MAMBA_2)),
    *(("quantized_matmul", dict(rows=128, features=1024, columns=3072, **of)) for of in MODES),
)
SERVED = (
    ("ragged_gated_delta_rule", dict(lengths=[512, 300, 1, 1, 1, 1, 200, 37], **FEATURES)),
    *((operation, dict(tokens=[128, 64, 1, 1], **PAGES)) for operation in TURBOQUANT),
)
DECODED = (
    ("gated_delta_rule", dict(batch=4, length=1, state=True, **FEATURES)),
    ("state_space_v1", dict(batch=4, length=1, state=True, **MAMBA)),
    ("state_space_v2", dict(batch=4, length=1, state=True, **MAMBA_2)),
    ("ragged_gated_delta_rule", dict(lengths=[1] * 64, **FEATURES)),
    *((operation, dict(tokens=[1] * 64, **PAGES)) for operation in TURBOQUANT),
    *(("quantized_matmul", dict(rows=1, features=1024, columns=3072, **of)) for of in MODES),
)
# How the release may be asked to compute a call.
VARIANTS = {"gated_delta_rule": ("recurrent", "64", "128")}
CALLS = (
    *((*call, mode) for call in TRAINED for mode in ("forward", "gradient")),
    *((*call, "forward") for call in (*SERVED, *DECODED)),
)


class Asked:
    """A process that makes calls with the ejkernel of a Python environment."""

    def __init__(self, python: str, **environment: str) -> None:
        known = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        cache = dict(EJKERNEL_CACHE_DIR=tempfile.mkdtemp())
        self.process = subprocess.Popen(
            [python, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tempfile.gettempdir(),  # where no other ejkernel is found
            env=known | cache | environment,
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def results(self, case: dict[str, Any]) -> tuple[list[np.ndarray], str]:
        """The results of a call, and the version of its JAX."""
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            answer = self(case=case, keep=file.name)
            with np.load(file.name) as found:
                return list(found.values()), answer["jax"]


def main() -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="operations; all if none is named")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each package")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further call is begun")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    if "EJKERNEL_RELEASE_PYTHON" not in os.environ:
        parser.error("EJKERNEL_RELEASE_PYTHON names no Python that has ejkernel 0.0.78")
    client, path = os.environ.get("EJKERNEL_CLIENT_PYTHON", sys.executable), str(Path(__file__).parents[1])
    ours, oracle = Asked(client, PYTHONPATH=path), Asked(client, PYTHONPATH=path, JAX_ENABLE_X64="1")
    release = Asked(os.environ["EJKERNEL_RELEASE_PYTHON"])
    rows, versions, began = [], {}, time.monotonic()
    for dtype in arguments.dtypes:
        for operation, sizes, mode in CALLS:
            is_in_time = time.monotonic() - began < arguments.seconds
            if is_in_time and (not arguments.only or operation in arguments.only):
                case = dict(operation=operation, sizes=sizes, dtype=dtype, mode=mode)
                rows += compared(case, ours, release, oracle, arguments.repeats, versions)
    convention = (
        f"of a call, least of {arguments.repeats} rounds in turn; this library with jax {versions.get('ours')}, "
        f"ejkernel 0.0.78 with jax {versions.get('release')}; errors in units of the epsilon of the dtype, relative to "
        "the norm of the result"
    )
    return conclude("release_cpu", rows, convention, arguments.out)


def compared(
    case: dict[str, Any], ours: Asked, release: Asked, oracle: Asked, repeats: int, versions: dict[str, str]
) -> list[Row]:
    """The rows of a call: its time and its error; one row without a rival if the release fails."""
    sizes = " ".join(f"{name}={shortened(x)}" for name, x in case["sizes"].items())
    name = f"{case['operation']} {case['mode']} {case['dtype']} {sizes}"
    variants = VARIANTS.get(case["operation"], ("",))
    own = with_variant(case, "ours" if variants[0] else "")
    found, versions["ours"] = ours.results(own)
    exact, _ = oracle.results(own | dict(dtype="float64"))
    if rivals := [x for x in (tried(release, with_variant(case, variant)) for variant in variants) if x]:
        _, rival, theirs, versions["release"] = min(rivals, key=lambda x: x[0])
        calls = max(1, min(200, int(BATCH_SECONDS / ours(case=own, calls=1)["seconds"])))
        times = {"ours": [], "release": []}
        for _ in range(repeats):
            times["ours"].append(ours(case=own, calls=calls)["seconds"])
            times["release"].append(release(case=rival, calls=calls)["seconds"])
        epsilon = dict(float32=2**-23, bfloat16=2**-7)[case["dtype"]]
        errors = [largest_error(x, exact) / epsilon for x in (found, theirs)]
        rows = [
            Row(name, min(times["ours"]) * 1e3, min(times["release"]) * 1e3, 1.0, "ms"),
            Row(f"{name}, error", *errors, 2.0 if errors[0] > 0.5 else None, "ε"),
        ]
    else:
        rows = [
            Row(f"{name}, which the release does not take", ours(case=own, calls=1)["seconds"] * 1e3, None, None, "ms")
        ]
    for row in rows:
        print(row.name, f"{row.ours:.4g}", row.rival and f"{row.rival:.4g} {row.measure:.3f}", flush=True)
    for asked in (ours, release, oracle):
        asked(forget=True)
    return rows


def tried(release: Asked, case: dict[str, Any]) -> tuple | None:
    """(seconds, case, results, version of JAX) of the release; None if it fails."""
    try:
        results, version = release.results(case)
    except Unavailable as reason:
        print(f"{case['operation']}, the release: {str(reason)[:200]}", file=sys.stderr)
        return None
    return min(release(case=case, calls=1)["seconds"] for _ in range(2)), case, results, version


def with_variant(case: dict[str, Any], variant: str) -> dict[str, Any]:
    """The case with one of the release's ways to compute it."""
    return case | dict(sizes=case["sizes"] | dict(variant=variant)) if variant else case


def shortened(x: Any) -> Any:
    """A list of equal numbers as their count and value."""
    return f"{len(x)}×{x[0]}" if isinstance(x, list) and len(set(x)) == 1 else str(x).replace(" ", "")


def largest_error(found: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """The largest error of a result, relative to its norm."""
    pairs = zip(found, exact, strict=True)
    return float(max(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-300) for x, y in pairs))


if __name__ == "__main__":
    sys.exit(main())
