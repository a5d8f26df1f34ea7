"""Another version of this library, which cannot be imported beside us, in a process that computes what it is asked for.

A line of JSON asks, a line of JSON answers. The process ends with its input, that is with this process.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from _harness import Batch, Contender, Prepared, Unavailable

_ONE_REQUEST = threading.Lock()


def asked(program: str, variable: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a program of this folder, one request at a time; `variable` names the folder of that version."""
    if variable not in os.environ:
        raise Unavailable(f"{variable} names no folder that holds it and what it imports")
    with _ONE_REQUEST:
        process = _started(program)
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{program} ended without an answer")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def batch_elsewhere(ask: Callable[[dict[str, Any]], Any], request: dict[str, Any]) -> Batch:
    """Calls in the process that is asked."""

    def batch(calls: int) -> None:
        ask(request | {"calls": calls})

    return batch


def earlier(benchmark: str, shape: Any, mode: str, dtype: Any) -> Contender:
    """This library as it was, from the folder that EJKERNEL_BEFORE names: `of_fields` of a benchmark (_earlier.py)."""

    def prepare() -> Prepared:
        request = {"benchmark": benchmark, "layer": asdict(shape), "mode": mode, "dtype": jnp.dtype(dtype).name}
        ask = partial(asked, "_earlier.py", "EJKERNEL_BEFORE")
        with tempfile.TemporaryDirectory() as folder:
            answer = ask(request | {"folder": folder})
            results = [np.load(f"{folder}/{n}.npy") for n in range(answer["results"])]
        return Prepared(results, batch_elsewhere(ask, request), answer["detail"])

    return Contender("ejkernel before", prepare)


@cache
def _started(program: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(program))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers on standard output; whatever else is printed goes to the errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answered), file=answers, flush=True)
