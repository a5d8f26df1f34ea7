"""The real TPU compiler, without a TPU: libtpu compiles for a given topology."""

import functools
import os

import jax
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
