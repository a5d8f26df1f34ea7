"""Compiles for TPUs without having them, and counts what the kernels of a program issue (see `_bundles`)."""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from ._bundles import Issued, execute


@dataclass(frozen=True)
class Generation:
    """One core of a TPU generation; the two cores of a v5p share a program, and each issues and copies its part.

    Attributes:
        topology: the topology to compile for.
        kind: the device kind in JAX.
        clock: the frequency in Hz: the published peak divided by the FLOPs of the matrix units in a cycle.
        bandwidth: the bandwidth of its part of HBM, in bytes per second.
        delay: the number of bundles issued after a branch before it is taken, as observed in programs.
    """

    topology: str
    kind: str
    clock: float
    bandwidth: float
    delay: int = 4


GENERATIONS = {
    "v5e": Generation("v5e:2x2", "TPU v5 lite", 1.5e9, 0.82e12),
    "v5p": Generation("v5p:2x2x1", "TPU v5", 1.75e9, 1.38e12),
    "v6e": Generation("v6e:2x2", "TPU v6 lite", 1.75e9, 1.64e12),
    "tpu7x": Generation("tpu7x:2x2x1", "TPU7x", 2.2e9, 3.69e12, delay=5),
}


@functools.cache
def device(generation: str) -> Any:
    """One core of a generation."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # it would ask the metadata server of a cloud machine, and wait
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it would let one process at a time use chips
    return topologies.get_topology_desc(platform="tpu", topology_name=GENERATIONS[generation].topology).devices[0]


class Compiler:
    """libtpu, which writes final programs to a folder. One for each process, as flags are read when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        jax.config.update("jax_platforms", "cpu")
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_.*"
        os.environ["LIBTPU_INIT_ARGS"] = flags

    def issued(
        self,
        generation: str,
        function: Callable[..., Any],
        arguments: Any,
        kernels: Mapping[str, Sequence[np.ndarray]],
    ) -> list[Issued]:
        """The work of the kernels in one call; `kernels` has the tables that each reads, by a pattern of its name."""
        for file in self.folder.iterdir():
            file.unlink()
        core = device(generation)
        on_core = jax.sharding.SingleDeviceSharding(core)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_core), arguments)
        abstract = jax.sharding.AbstractDevice(device_kind=core.device_kind, num_cores=1, platform="tpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract)):
            lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
        lowered.compile()
        delay = GENERATIONS[generation].delay
        return [execute(*self._program(name), tables, delay) for name, tables in kernels.items()]

    def _program(self, name: str) -> tuple[str, str]:
        """The text of a final program, and of the utilization of its bundles."""
        pattern = re.compile(rf"(\d+-{name}(?:\.\d+)?-)\d+-final_bundles\.txt")
        names = [file.name for file in self.folder.iterdir()]
        (found,) = filter(None, map(pattern.fullmatch, names))
        (beside,) = (
            n for n in names if n.startswith(found[1]) and n.endswith("final_hlo-static-per-bundle-utilization.txt")
        )
        return (self.folder / found[0]).read_text(), (self.folder / beside).read_text()
