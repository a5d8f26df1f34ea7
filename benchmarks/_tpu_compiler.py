"""Compiles for TPUs that are not there, and says what the kernels of a program issue (see `_bundles`)."""

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
    """One core; of a v5p, whose two cores share a program, what each of them issues and copies.

    Attributes:
        topology: to compile for.
        kind: how JAX calls the device.
        clock: in Hz: the published peak over what the matrix units multiply in a cycle.
        bandwidth: of its share of HBM, in bytes per second.
        delay: bundles after a branch that are issued before it is taken, as seen in programs.
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
    """libtpu, told to write final programs to a folder. One for a process: it reads its flags when it is loaded."""

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
        """What the kernels issue in one call; of each the name, or a pattern for it, and the tables that it reads."""
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
        """The text of a final program, and that of what each of its bundles uses."""
        pattern = re.compile(rf"(\d+-{name}(?:\.\d+)?-)\d+-final_bundles\.txt")
        names = [file.name for file in self.folder.iterdir()]
        (found,) = filter(None, map(pattern.fullmatch, names))
        (beside,) = (
            n for n in names if n.startswith(found[1]) and n.endswith("final_hlo-static-per-bundle-utilization.txt")
        )
        return (self.folder / found[0]).read_text(), (self.folder / beside).read_text()
