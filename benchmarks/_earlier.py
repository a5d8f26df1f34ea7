"""An earlier commit of this library: a process that calls one of its operations in a mode, on arrays in files.

The first request for a folder writes the results there; `calls` is the number of further calls.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._serve import serve, version_of

ejkernel = version_of("EJKERNEL_BEFORE")

from ._contenders import Inputs, of_jax
from ._harness import Prepared


@lru_cache(maxsize=1)
def prepared(text: str) -> Prepared:
    """The call of a request, as JSON, whose results are written to its folder."""
    request = json.loads(text)
    folder, names = request["folder"], request["operands"]
    arrays = {file.stem: _array(np.load(file)) for file in Path(folder).glob("*.npy")}
    operands, cotangent = tuple(arrays.pop(name) for name in names), arrays.pop("cotangent")
    tangents = tuple(arrays.pop(f"{name}_dot") for name in names if f"{name}_dot" in arrays)
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in request["options"].items()}

    def call(*operands: jax.Array, **others: jax.Array) -> Any:
        function = getattr(ejkernel.lax, request["operation"])
        return function(**dict(zip(names, operands, strict=True)), **others, **options)

    given = Inputs(operands, cotangent, tangents, arrays)
    ran = of_jax("before", lambda: call, request["mode"], given, request["operation"]).prepare()
    for n, x in enumerate(ran.results):
        np.save(f"{folder}/result{n}.npy", np.asarray(x).astype(np.float32))
    return ran


def _array(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.view(jnp.bfloat16) if x.dtype == np.uint16 else x)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The configs of the call, and the number of its results."""
    calls = request.pop("calls")
    ran = prepared(json.dumps(request))
    if calls:
        ran.batch(calls)
    return {"detail": ran.detail, "results": len(ran.results)}


if __name__ == "__main__":
    serve(answer)
