"""The other end of `_process`: a process that answers requests, with the ejkernel that it can import.

This module imports nothing of the library, as the process has to import its own version first.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def version_of(variable: str) -> ModuleType:
    """Imports ejkernel from the folder in an environment variable, from which later imports come too."""
    folder = os.path.abspath(os.environ[variable])
    sys.path.insert(0, folder)
    found = importlib.import_module("ejkernel")
    if not Path(found.__file__ or "").is_relative_to(folder):
        raise ImportError(f"{variable}={folder} holds no ejkernel; the one that is found is {found.__file__}")
    return found


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Writes answers to standard output; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except Exception as error:
            answered = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answered), file=answers, flush=True)
