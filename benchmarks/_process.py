"""Calls of another version of this library, which needs a process of its own as the package name is the same.

Requests and answers are lines of JSON (see _serve.py). The process ends with its standard input, when this one ends.
"""

import json
import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from ._harness import Unavailable

_ONE_REQUEST = threading.Lock()


def asked(program: str, variable: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a module of this package, one request at a time; `variable` names the folder of that version."""
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


@cache
def _started(program: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
