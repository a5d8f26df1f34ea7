"""Contenders that are other versions of this library, each in a process of its own, with arrays in files."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ._contenders import Inputs
from ._harness import Batch, Contender, Prepared
from ._process import asked


def of_earlier(
    operation: str, names: tuple[str, ...], options: Mapping[str, Any], mode: str, given: Inputs
) -> Contender:
    """An earlier commit of this library, from the folder in EJKERNEL_BEFORE (see _earlier.py).

    `names` are those of the operands, `options` the static arguments in `ejkernel.lax`.
    """
    return Contender("ejkernel before", lambda: _earlier(operation, names, options, mode, given))


def _earlier(operation: str, names: tuple[str, ...], options: Mapping[str, Any], mode: str, given: Inputs) -> Prepared:
    ask = partial(asked, "_earlier", "EJKERNEL_BEFORE")
    request = dict(operation=operation, operands=names, options=options, mode=mode)
    arrays = dict(zip(names, given.operands, strict=True)) | dict(given.others) | {"cotangent": given.cotangent}
    if given.tangents:
        arrays |= {f"{name}_dot": x for name, x in zip(names, given.tangents, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        left(folder, arrays)
        request["folder"] = folder
        answer = ask(request | {"calls": 0})
        results = [np.load(f"{folder}/result{n}.npy") for n in range(answer["results"])]
    return Prepared(results, elsewhere(ask, request), answer["detail"])


def left(folder: str, arrays: Mapping[str, Array]) -> None:
    """Writes arrays to files for another process, as NumPy has no bfloat16."""
    for name, x in arrays.items():
        values = np.asarray(x)
        np.save(Path(folder) / f"{name}.npy", values.view(np.uint16) if x.dtype == jnp.bfloat16 else values)


def elsewhere(ask: Callable[[dict], dict], request: dict) -> Batch:
    """A contender's calls, in another process."""

    def batch(calls: int) -> None:
        ask(request | {"calls": calls})

    return batch
