"""A mesh over the devices of a program, in whose axes the shardings that XLA chose can be written.

XLA tells which tile of an array each device holds, without a mesh. The mesh of the user may be unknown (for arrays that
were made before it was set), one of several, or coarser than a sharding: XLA may split heads over a part of a mesh
axis, such as two heads over an axis of four. So the number of devices is factored into primes, with an axis for each:
this mesh can express any split that another mesh over these devices can.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec, Sharding


def decoded(arrays: Mapping[str, Any]) -> tuple[AbstractMesh, dict[str, PartitionSpec]]:
    """The mesh, and the spec of each array in its axes.

    An axis that is split in another way, or into parts of unequal size, which XLA pads with undefined values, counts as
    whole.
    """
    tiles = {name: _tiles(x.sharding, len(x.shape)) for name, x in arrays.items()}
    devices = len(next(iter(tiles.values())))
    return max(
        ((mesh, _specs(mesh, tiles, arrays)) for mesh in _meshes(devices)),
        key=lambda of: sum(entry is not None for spec in of[1].values() for entry in spec),
    )


def _tiles(sharding: Sharding, ndim: int) -> np.ndarray:
    """The index of the tile that each device holds, [devices, ndim]."""
    devices = len(sharding.device_set)
    parts = sharding.devices_indices_map((devices,) * ndim).values()  # a size that every number of tiles divides
    starts = np.array([[part.start or 0 for part in of] for of in parts], int).reshape(devices, ndim)
    return starts // np.array([min(filter(None, of), default=devices) for of in starts.T], int).reshape(ndim)


def _meshes(devices: int) -> Iterator[AbstractMesh]:
    """The meshes with a prime number of devices per axis, in every order of the primes."""
    for shape in _factorings(devices):
        yield AbstractMesh(shape, tuple(f"factor{i}" for i in range(len(shape))))


def _factorings(n: int) -> Iterator[tuple[int, ...]]:
    if n == 1:
        yield ()
    for prime in range(2, n + 1):
        if n % prime == 0 and all(prime % d for d in range(2, math.isqrt(prime) + 1)):
            for rest in _factorings(n // prime):
                yield (prime, *rest)


def _specs(mesh: AbstractMesh, tiles: Mapping[str, np.ndarray], arrays: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    return {
        name: PartitionSpec(*(_entry(mesh, of, size) for of, size in zip(tiles[name].T, x.shape, strict=True)))
        for name, x in arrays.items()
    }


def _entry(mesh: AbstractMesh, tile: np.ndarray, size: int) -> tuple[str, ...] | None:
    """The mesh axes along which a device's tile changes, the major one first; None if these do not determine it."""
    tile, index = tile.reshape(mesh.axis_sizes), np.indices(mesh.axis_sizes)
    step = [tile.take(1, axis).flat[0] for axis in range(tile.ndim)]
    split = sorted((axis for axis, by in enumerate(step) if by), key=step.__getitem__, reverse=True)
    count = math.prod(tile.shape[axis] for axis in split)
    if split and size % count == 0 and np.array_equal(tile, sum(index[axis] * step[axis] for axis in split)):
        return tuple(mesh.axis_names[axis] for axis in split)
    return None
