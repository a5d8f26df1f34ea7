"""What ring_attention does not support, with whose argument names; it is registered as an operation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel import lax, modules
from ejkernel.callib import Ceilings

from .calls import mesh_of


def refused(size=2, q=(1, 8, 2, 8), k=(1, 8, 2, 8), **options):
    mesh = mesh_of(size)
    call = lambda q, k: lax.ring_attention(q, k, k, **{"axis_name": "x", **options})
    types = [jax.ShapeDtypeStruct((shape[0], size * shape[1], *shape[2:]), jnp.float32) for shape in (q, k)]
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), *types)


CUTS, IDS = np.array([0, 4]), np.zeros((1, 8), np.int32)
DROPOUT = dict(dropout_rate=0.5, dropout_key=np.zeros(2, np.uint32))
WRONG = {
    "there is no axis 'y' here; call it inside jax.shard_map": dict(axis_name="y"),
    r"axis_name is \('x', 'x'\); it must name each mesh axis once": dict(axis_name=("x", "x")),
    "layout is 'spiral'; it must be one of contiguous, striped, zigzag": dict(layout="spiral"),
    "strategy is 'fast'; it must be auto, ring, all_gather, ulysses, usp": dict(strategy="fast"),
    "q has 7 tokens; zigzag needs an even number": dict(q=(1, 7, 2, 8), k=(1, 8, 2, 8)),
    "k has 5 tokens; zigzag needs an even number": dict(k=(1, 5, 2, 8)),
    "k has batch 2 but q has 1": dict(k=(2, 8, 2, 8)),
    "cu_seqlens_q and cu_seqlens_k must be given together": dict(cu_seqlens_q=CUTS),
    "q has 4 axes; it must have 3: tokens of this device, heads": dict(cu_seqlens_q=CUTS, cu_seqlens_k=CUTS),
    "give one of them": dict(cu_seqlens_q=CUTS, cu_seqlens_k=CUTS, q_segment_ids=IDS, kv_segment_ids=IDS),
    "max_seqlen_q and max_seqlen_k are for packed sequences": dict(max_seqlen_k=4),
    "dropout_rate is 0.5 but dropout_key is not given": dict(dropout_rate=0.5),
    "window is 0; a number of keys": dict(window=0),
    "bias of shape .* does not broadcast to .*1, 2, 8, 16": dict(bias=np.zeros((8, 8), np.float32)),
    "ulysses splits heads, and 2 query and 2 key/value heads are no multiples of 4 dev": dict(
        size=4, strategy="ulysses"
    ),
    "ulysses would need the bias or mask of all rows": dict(strategy="ulysses", mask=np.ones((8, 16), bool)),
    "ulysses would need the bias or mask of all rows on each": dict(
        strategy="ulysses", layout="striped", q=(1, 1, 2, 8), k=(1, 1, 2, 8), mask=np.ones((1, 2), bool)
    ),
    r"usp needs two mesh axes, .*: axis_name=\(across, within\)": dict(strategy="usp"),
    "all_gather has no causal mask .* use ring, or the layout zigzag": dict(
        strategy="all_gather", layout="striped", causal=True
    ),
    "dropout is for sequences that are not packed: flash_attention draws for the tokens of each": dict(
        q=(8, 2, 8), k=(8, 2, 8), cu_seqlens_q=CUTS, cu_seqlens_k=CUTS, **DROPOUT
    ),
    "q_segment_ids is given without kv_segment_ids": dict(q_segment_ids=IDS),
}


@pytest.mark.core
@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises(ValueError, match=f"^ring_attention: .*{message}"):
        refused(**WRONG[message])


@pytest.mark.core
def test_outside_of_shard_map():
    x = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(ValueError, match=r"no axis 'x' here; call it inside jax\.shard_map"):
        lax.ring_attention(x, x, x, axis_name="x")
    with pytest.raises(TypeError, match="axis_name is 3; it must be the name of a mesh axis"):
        lax.ring_attention(x, x, x, axis_name=3)


def test_an_axis_of_vmap():
    q = jnp.zeros((2, 1, 8, 2, 8))
    ring = lambda q: lax.ring_attention(q, q, q, axis_name="x", strategy="ring", layout="contiguous", causal=True)
    with pytest.raises(NotImplementedError, match=r"^ring_attention: .*the axis is one of jax.vmap, .*jax.shard_map"):
        jax.vmap(ring, axis_name="x")(q)


def test_flash_attention_names_it():
    mesh = mesh_of(2, AxisType.Explicit)
    x = jax.device_put(jnp.zeros((1, 8, 2, 8)), NamedSharding(mesh, P(None, "x")))
    with pytest.raises(ValueError, match=r"axis s of q is sharded over 'x'; .*ejkernel.lax.ring_attention"):
        lax.flash_attention(x, x, x)


# --- As an operation of its name --------------------------------------------------------------------------------------


def test_it_is_the_same_in_modules():
    assert modules.ring_order is lax.ring_order


def test_it_is_explained():
    """The strategy with its reason, and the calls of flash_attention."""
    told = []

    def call(q, k, v):
        told.append(ejkernel.explain("ring_attention", q, k, v=v, axis_name="x", causal=True, strategy="ring"))
        told.append(ejkernel.explain("ring_attention", q, k, v=v, axis_name="x", causal=True))
        return q

    x = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.bfloat16)
    jax.eval_shape(jax.shard_map(call, mesh=mesh_of(2), in_specs=P(None, "x"), out_specs=P(None, "x")), x, x, x)
    assert told[0].runs and told[0].origin.endswith("what follows; strategy ring: it was asked for")
    assert {part.operation for part in told[0].parts} == {"flash_attention"} and len(told[0].parts) == 3
    assert "strategy ring: a model of the forward has ring 0.20 ms, all_gather 0.20 ms" in told[1].origin
    assert ejkernel.explain("ring_order", 16, 4, layout="striped").runs


def test_several_processes_choose_by_the_same_rates(monkeypatch):
    """What each has measured may differ, and with it the strategy, whose collectives would wait for each other."""
    measured = Ceilings("slow", copy=4e12, matmul={"bfloat16": 1e12, "float32": 1e12}, jax="")
    monkeypatch.setattr("ejkernel.modules.operations.ring_attention.known_ceilings", lambda kind: measured)
    q, k = (jax.ShapeDtypeStruct((1, 4 * 4096, heads, 128), jnp.bfloat16) for heads in (8, 8))
    chosen = []

    def call(q, k):
        chosen.append(re.search(r"strategy (\w+)", str(ejkernel.explain("ring_attention", q, k, k, axis_name="x")))[1])
        return q

    for processes in (1, 2):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        jax.eval_shape(jax.shard_map(call, mesh=mesh_of(4), in_specs=P(None, "x"), out_specs=P(None, "x")), q, k)
    assert chosen == ["ring", "all_gather"]
