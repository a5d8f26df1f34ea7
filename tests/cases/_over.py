"""Mesh axes over which an operation such as ring_attention is called, inside `jax.shard_map`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Over:
    """The mesh axes that split the arrays of a call.

    Attributes:
        split: the mesh axis that splits each letter.
        devices: the size of each of these axes, if a test has no mesh.
        communicates: the kinds of collectives that the operation itself uses.
        mesh: the mesh of a test, which has these axes and may have others.
    """

    split: Mapping[str, str]
    devices: Mapping[str, int]
    communicates: tuple[str, ...]
    mesh: Mesh | None = None

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The number of devices on each axis."""
        return {name: self.mesh.shape[name] if self.mesh else size for name, size in self.devices.items()}

    @property
    def program(self) -> tuple[Any, ...]:
        """A key of the compiled program, for the mesh."""
        return tuple(self.split.items()), tuple(self.axis_sizes.items()), self.mesh

    def run(self, call: Callable, specs: Mapping[str, PartitionSpec], results: Any) -> Callable:
        """A function of the arrays of each device as one of whole arrays, under `jax.jit`."""
        mesh = self.mesh or self._own_mesh()
        on_devices = jax.shard_map(
            call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names=frozenset(self.devices)
        )
        return jax.jit(lambda arrays: on_devices({n: _resharded(x, specs[n], mesh) for n, x in arrays.items()}))

    def placed(self, arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec]) -> dict[str, Any]:
        """The arrays on the devices of the mesh."""
        mesh = self.mesh or self._own_mesh()
        return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}

    def _own_mesh(self) -> Mesh:
        names, shape = tuple(self.devices), tuple(self.devices.values())
        devices = jax.devices()[: math.prod(shape)]
        return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def _resharded(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """x with the split that `jax.shard_map` requires of Explicit axes; splits by other axes stay."""
    if AxisType.Explicit not in mesh.axis_types:
        return x
    now = jax.typeof(x).sharding
    others = now.spec if now.mesh.axis_names else PartitionSpec(*[None] * x.ndim)
    wanted = PartitionSpec(*(b if a is None else a for a, b in zip(spec, others, strict=True)))
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted))
