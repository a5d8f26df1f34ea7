"""The demo with its sequences sharded over devices: the same model, whose attention is `lax.ring_attention`."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import lax

_AXIS = "context"
_BY_TOKENS = P(None, _AXIS)


@dataclass(frozen=True)
class ContextParallel:
    """Sequences sharded over `size` devices in zigzag order, by which a causal mask gives all equal work."""

    length: int
    size: int

    @cached_property
    def order(self) -> np.ndarray:
        """The positions of the tokens, as they are sharded."""
        return lax.ring_order(self.length, self.size)[0]

    @cached_property
    def mesh(self) -> Mesh:
        """The first devices of the process; raises a ValueError where they are too few."""
        devices = jax.devices()
        if len(devices) < self.size:
            there = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)} of {devices[0].device_kind}"
            raise ValueError(f"{self.size} devices are asked for; {there}")
        return jax.make_mesh((self.size,), (_AXIS,), axis_types=(AxisType.Auto,), devices=devices[: self.size])

    def replicated(self, tree: Any) -> Any:
        """Arrays on each of the devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def sharded(self, tokens: Any) -> Array:
        """Tokens [batch,length], which are in order, on the devices."""
        return jax.device_put(tokens, NamedSharding(self.mesh, _BY_TOKENS))

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """flash_attention of the whole sequences."""
        of_device = partial(lax.ring_attention, axis_name=_AXIS, **options)
        return jax.shard_map(of_device, mesh=self.mesh, in_specs=(_BY_TOKENS,) * 3, out_specs=_BY_TOKENS)(q, k, v)


def make_cpu_devices(size: int) -> None:
    """On a CPU, and before JAX has looked for devices, as many of them."""
    try:
        jax.config.update("jax_num_cpu_devices", size)
    except (RuntimeError, ValueError):
        return  # JAX has looked, or XLA_FLAGS say how many; who needs them tells where they are too few
