"""This library as it was: a process that calls it on a layer in a mode, with the same arrays as we do.

The first request for a layer has a folder, where the results are left; others say how many calls are to be made. What
is called is `of_fields(layer, mode, dtype)` of the module that the request names, one of this folder.
"""

import importlib
import json
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.path.abspath(os.environ["EJKERNEL_BEFORE"]))
from _harness import Prepared
from _process import serve

import ejkernel

if not Path(ejkernel.__file__).is_relative_to(sys.path[0]):
    raise ImportError(f"EJKERNEL_BEFORE={sys.path[0]} holds no ejkernel; the one that is found is {ejkernel.__file__}")


@lru_cache(maxsize=1)
def prepared(benchmark: str, layer: str, mode: str, dtype: str) -> Prepared:
    """The call of our own kind."""
    return importlib.import_module(benchmark).of_fields(json.loads(layer), mode, dtype)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the call is made of, and of how many results."""
    ran = prepared(request["benchmark"], json.dumps(request["layer"]), request["mode"], request["dtype"])
    if "folder" in request:
        for n, x in enumerate(ran.results):
            np.save(f"{request['folder']}/{n}.npy", np.asarray(x).astype(np.float32))
    else:
        ran.batch(request["calls"])
    return {"detail": ran.detail, "results": len(ran.results)}


if __name__ == "__main__":
    serve(answer)
