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
    """Sequences sharded over `size` devices in zigzag order, which balances the work of a causal mask."""

    length: int
    size: int

    @cached_property
    def order(self) -> np.ndarray:
        """The positions of the tokens, as they are sharded."""
        return lax.ring_order(self.length, self.size)[0]

    @cached_property
    def mesh(self) -> Mesh:
        """A mesh of the first devices of the process; raises a ValueError if there are too few."""
        devices = jax.devices()
        if len(devices) < self.size:
            there = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)} of {devices[0].device_kind}"
            raise ValueError(f"{self.size} devices are asked for; {there}")
        return jax.make_mesh((self.size,), (_AXIS,), axis_types=(AxisType.Auto,), devices=devices[: self.size])

    def replicated(self, tree: Any) -> Any:
        """Arrays on each of the devices."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def sharded(self, tokens: Any) -> Array:
        """Tokens [batch,length] on the devices; they are already in the order of `order`."""
        return jax.device_put(tokens, NamedSharding(self.mesh, _BY_TOKENS))

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Attention over the whole sequences, by `ring_attention`."""
        of_device = partial(lax.ring_attention, axis_name=_AXIS, **options)
        return jax.shard_map(of_device, mesh=self.mesh, in_specs=(_BY_TOKENS,) * 3, out_specs=_BY_TOKENS)(q, k, v)


def make_cpu_devices(size: int) -> None:
    """Asks JAX for `size` CPU devices, which it grants before its backends are initialised."""
    try:
        jax.config.update("jax_num_cpu_devices", size)
    except (RuntimeError, ValueError):
        return  # the backends are initialised, or XLA_FLAGS say how many; `mesh` raises if there are too few
