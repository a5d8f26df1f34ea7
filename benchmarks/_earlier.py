"""An earlier commit of this library: a process that calls its flash_attention in a mode, on arrays in files.

The first request for a folder writes the results there; `calls` is the number of further calls.
"""

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
def prepared(folder: str, mode: str, dtype: str, causal: bool, window: tuple, softcap: float | None) -> Prepared:
    """The call, whose results are written to the folder."""
    arrays = {file.stem: _array(np.load(file), dtype) for file in Path(folder).glob("*.npy")}
    tangents = tuple(arrays[f"{name}_dot"] for name in "qkv")
    others = {"sinks": arrays["sinks"]} if "sinks" in arrays else {}
    given = Inputs(tuple(arrays[name] for name in "qkv"), arrays["do"], tangents, others)
    attention = lambda q, k, v, **sinks: ejkernel.lax.flash_attention(
        q, k, v, **sinks, causal=causal, window=window, softcap=softcap
    )
    ran = of_jax("before", lambda: attention, mode, given, "flash_attention").prepare()
    for n, x in enumerate(ran.results):
        np.save(f"{folder}/result{n}.npy", np.asarray(x).astype(np.float32))
    return ran


def _array(x: np.ndarray, dtype: str) -> jax.Array:
    return jnp.asarray(x.view(jnp.bfloat16) if dtype == "bfloat16" and x.dtype == np.uint16 else x)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The configs of the call, and the number of its results."""
    options = request["options"]
    window = tuple(options["window"])
    ran = prepared(request["folder"], request["mode"], request["dtype"], options["causal"], window, options["softcap"])
    if request["calls"]:
        ran.batch(request["calls"])
    return {"detail": ran.detail, "results": len(ran.results)}


if __name__ == "__main__":
    serve(answer)
