"""The real TPU compiler, without a TPU: libtpu compiles for a given topology."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from ejkernel.types import Target

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TARGETS = {
    "v5e": Target("tpu", "TPU v5 lite"),
    "v5p": Target("tpu", "TPU v5"),
    "v6e": Target("tpu", "TPU v6 lite"),
    "tpu7x": Target("tpu", "TPU7x"),
}


@functools.cache
def device(generation: str):
    """One core of a generation."""
    # Otherwise libtpu asks the metadata server of a cloud machine what it runs on, and waits for the answer.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Otherwise only one process at a time may load it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices[0]


def compiled(function, generation: str, *arguments):
    """The function compiled for arguments of these shapes."""
    on_device = jax.sharding.SingleDeviceSharding(device(generation))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), arguments)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()


by_generation = pytest.mark.parametrize(
    "generation", [pytest.param(name, marks=() if name == "tpu7x" else pytest.mark.slow) for name in TARGETS]
)


def compile_recurrence(kernels: tuple[Callable, ...], generation: str, spec: Any, x: Any, ct: Any, wrt: tuple) -> None:
    """Compiles forward, backward and tangent, by every config for a v5e, and by the heuristic one for the others."""
    pytest.importorskip("libtpu")
    forward, backward, tangent = kernels
    for config in forward.space(spec, x, TARGETS[generation])[: None if generation == "v5e" else 1]:
        how = dict(spec=spec, config=config)
        compiled(lambda *x, how=how: forward(*x, **how), generation, *x)
        compiled(lambda x, ct, how=how: backward(x, None, ct, wrt=wrt, **how), generation, x, ct)
        compiled(lambda x, dot, how=how: tangent(x, None, dot, **how), generation, x, x._replace(spans=None))
