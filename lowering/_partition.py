"""Partitioning of an operation over devices: an implementation always gets the local arrays of one device.

* Explicit axes: the implementation runs inside `jax.shard_map` with specs read from the types of the operands. Operands
  without a mesh are whole on each device.
* Auto axes: XLA splits the program, by the Shardy rule of a `custom_partitioning`.
* Manual axes: the arrays are local already. Auto axes beside them are left to XLA, which gathers the operands of a
  kernel.

If a result lacks an axis that is split (the gradient of a bias that all batch elements share), each device holds a part
of its sum, and `psum` adds them. There is no other communication.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.primitives._factory import KernelPrimitive
from ejkernel.primitives._sharding import (
    Split,
    explicit_axes_of,
    joined,
    names_of,
    partition_spec,
    shardy_rule,
    summed_over,
)

from ._context import one_device
from ._device_mesh import decoded

Body = Callable[..., list[Any]]


def explicit(
    primitive: KernelPrimitive, body: Body, operands: Mapping[str, Any], results: Sequence[str], spec: Any, mesh: Any
) -> Body:
    """`body` over the Explicit axes of `mesh`, which is that of the operands if they have one."""
    split, _ = primitive.split(operands)
    shapes = primitive.result_shapes(operands, results, spec)
    return jax.shard_map(
        _summing(primitive, body, results, shapes, split),
        mesh=mesh,
        in_specs=tuple(partition_spec(primitive.table[n], x.shape, split) for n, x in operands.items()),
        out_specs=[partition_spec(primitive.table[n], shape, split) for n, (shape, _) in shapes.items()],
        axis_names=explicit_axes_of(mesh),
        check_vma=False,
    )


def automatic(
    primitive: KernelPrimitive, body: Body, operands: Mapping[str, Any], results: Sequence[str], spec: Any
) -> Body:
    """`body` under a rule that tells XLA's partitioner which axes may be split."""
    shapes = primitive.result_shapes(operands, results, spec)
    outputs = {n: jax.ShapeDtypeStruct(*of) for n, of in shapes.items()}
    rule, whole, sizes = shardy_rule(primitive.table, primitive.layout, operands, outputs)

    def partition(_, arguments, __):
        mesh, specs = decoded(dict(zip(operands, arguments, strict=True)))
        split = _agreed(primitive, operands, specs, mesh)
        place = lambda n, shape: NamedSharding(mesh, partition_spec(primitive.table[n], shape, split))
        return (
            mesh,
            _alone(_summing(primitive, body, results, shapes, split)),
            [place(n, shape) for n, (shape, _) in shapes.items()],
            tuple(place(n, x.shape) for n, x in operands.items()),
        )

    # jit makes arrays that the body closes over part of an inner program, as custom_partitioning does not allow them.
    wrapped = custom_partitioning(jax.jit(body))
    wrapped.def_partition(
        partition, decode_shardings=False, sharding_rule=rule, need_replication_factors=whole, **sizes
    )
    return wrapped


def _alone(body: Body) -> Body:
    """`body` for XLA's partitioner, which traces it when the program is compiled, in the context of that moment."""

    def run(*arrays):
        with one_device():
            return body(*arrays)

    return run


def _agreed(primitive: KernelPrimitive, operands: Mapping[str, Any], specs: Mapping[str, Any], mesh: Any) -> Split:
    """A consistent split from XLA's proposals: the first operand that splits an axis decides, the rest is gathered."""
    heads, groups = primitive.layout.group or (None, None)
    chosen: dict[str, Any] = {}
    for name, x in operands.items():
        for axis, size, entry in zip(primitive.table[name], x.shape, specs[name], strict=True):
            letter = heads if axis.letter == groups else axis.letter
            taken = {n for other, e in chosen.items() if other != letter for n in names_of(e)}
            if entry and size != 1 and letter in primitive.layout.split and not taken.intersection(names_of(entry)):
                chosen.setdefault(letter, entry)
    agreed = {n: partition_spec(primitive.table[n], x.shape, chosen) for n, x in operands.items()}
    try:
        return joined(primitive.name, primitive.table, primitive.layout, operands, agreed, mesh)
    except ValueError:  # heads cannot be split in this way: they are gathered, the rest stays split
        rest = {n: PartitionSpec(*_drop(primitive, n, spec)) for n, spec in agreed.items()}
        return joined(primitive.name, primitive.table, primitive.layout, operands, rest, mesh)


def _drop(primitive: KernelPrimitive, name: str, spec: PartitionSpec) -> list[Any]:
    heads = primitive.layout.group or ()
    return [None if axis.letter in heads else entry for axis, entry in zip(primitive.table[name], spec, strict=True)]


def _summing(
    primitive: KernelPrimitive, body: Body, results: Sequence[str], shapes: Mapping[str, tuple], split: Split
) -> Body:
    """`body` with gradients that lack a split axis summed over devices."""
    if not primitive.sums:
        return body

    def run(*arrays):
        out = body(*arrays)
        over = [summed_over(primitive.table[n], shapes[n][0], split) for n in results]
        return [jax.lax.psum(x, names) if names else x for x, names in zip(out, over, strict=True)]

    return run
