"""Shared by tests of sharded sequences: arrays, and the recurrence over shards beside that over the whole."""

import jax
import numpy as np
from cases._case import Operand
from cases._recurrence import PACKED, case, gate
from cases.flash_attention import scalar
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = dict(b=2, s=24, h=4, g=2, d=8, e=16)
OF_THE_WHOLE = ("g_gamma", "initial_state", "cu_seqlens", "softmax_scale")
GATES = dict(g=gate("b s h"), gk=gate("b s h d"), gv=gate("b s h e"), g_gamma=gate("h"))
OF_PACKED = {name: Operand(x.axes.replace("b s", "1 s"), x.values) for name, x in GATES.items()}


def cuts(rng, shape):
    """Tokens before the first sequence and after the last, empty sequences, and one over most of the devices."""
    return np.array([1, 3, 3, 17, 17, 20, 23], np.int32)


def packed(name, gates, **options):
    operands = {n: x for n, x in OF_PACKED.items() if n in gates}
    operands |= dict(initial_state="n h d e", cu_seqlens=Operand("m", cuts))
    return case("recurrent", name, operands, SIZES | dict(n=6, m=7), of=PACKED, return_state=True, **options)


CASES = {
    "gla": case("gla", "gla", dict(gk=GATES["gk"], initial_state="b h d e"), SIZES, return_state=True),
    "lightning": case(
        "lightning_attention", "lightning", {}, SIZES, return_state=True, layer_idx=0, num_layers=2, reverse=True
    ),
    "every_decay": case(
        "recurrent",
        "every_decay",
        GATES | dict(initial_state="b h d e", softmax_scale=Operand("", scalar)),
        SIZES,
        return_state=True,
    ),
    "no_decay": case("recurrent", "no_decay", {}, SIZES),
    "packed": packed("packed", ("g", "gk", "g_gamma")),
    "packed_reversed": packed("packed_reversed", ("gk", "gv"), reverse=True),
}


def mesh_of(size, types=AxisType.Auto):
    return jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(types,))


def specs_of(arrays):
    return {name: P() if name in OF_THE_WHOLE else P(None, "x") for name in arrays}


def sharded(of, size, types=AxisType.Auto):
    """Arrays of the whole sequence → its results, computed over that many devices."""

    def run(arrays):
        specs, mesh = specs_of(arrays), mesh_of(size, types)
        results = [P(None, "x"), P()][: len(of.results)]
        call = lambda x: of.call(x, axis_name="x")
        if types == AxisType.Explicit:
            arrays = {name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        found = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=results)(arrays)
        return (
            [jax.sharding.reshard(x, NamedSharding(mesh, P())) for x in found] if types == AxisType.Explicit else found
        )

    return run
