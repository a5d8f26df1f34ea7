"""What keys and fingerprints distinguish and what not; another process builds the same; JSON."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shown
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shown import Config, Shown, key_of, ones

from ejkernel.ops import (
    Invocation,
    from_json,
    sharding_fingerprint,
    stable_json,
    to_json,
)
from ejkernel.ops.utils.devices import local_target
from ejkernel.ops.utils.fingerprints import key_of as key_of_target
from ejkernel.ops.utils.fingerprints import versions_fingerprint
from ejkernel.ops.utils.operands import abstract
from ejkernel.ops.utils.serialization import pack, unpack
from ejkernel.types import Platform, Target


class Operands(NamedTuple):
    q: object
    mask: object = None


def test_contents_of_a_key():
    key = key_of(Shown(), ones(), None, Operands(ones()), window=(None, 3), causal=True)
    for part in (
        "shown@v1",
        "f32[4,4]",
        "None",
        "causal': true",
        "(None, 3)",
        "cpu",
        f"jax {jax.__version__}",
        "source ",
    ):
        assert part in key


def test_what_keys_depend_on():
    a, run = ones(), Shown()

    class Raised(Shown):
        version = 2

    class Rewritten(Shown):
        def run(self, a, *, cfg):
            return a

    calls = [
        key_of(run, a),
        key_of(run, a, a),
        key_of(run, (a,)),
        key_of(run, a, None),
        key_of(run, None, a),
        key_of(run, a, b=a),
        key_of(run, a, b=None),
        key_of(run, a[:2]),
        key_of(run, a.astype(jnp.bfloat16)),
        key_of(run, a, scale=1),
        key_of(run, a, scale=1.0),
        key_of(run, a, scale=True),
        key_of(run, a, scale="1"),
        key_of(run, a, platform=Platform.XLA),
        key_of(run, a, config=Config()),
        key_of(run, a, config=Config(2)),
        key_of(run, a, builder=key_of),
        key_of(run, a, builder=ones),
        key_of(Shown("other"), a),
        key_of(Raised(), a),
        key_of(Rewritten(), a),
        key_of_target(run, (a,), {}, Target("tpu")),
        key_of_target(run, (a,), {}, Target("tpu", "TPU v5 lite")),
    ]
    assert len(set(calls)) == len(calls)


def test_what_keys_do_not_depend_on():
    a = ones()
    assert (
        key_of(Shown(), a) == key_of(Shown(), np.asarray(a)) == key_of(Shown(), abstract(a)) == key_of(Shown(), a + 1)
    )
    assert key_of(Shown(), a, x=1, y=2) == key_of(Shown(), a, y=2, x=1)
    seen = []
    jax.jit(lambda a: seen.append(key_of(Shown(), a)))(a)
    jax.vmap(lambda a: seen.append(key_of(Shown(), a)))(jnp.stack([a, a]))
    jax.grad(lambda a: (seen.append(key_of(Shown(), a)), a.sum())[1])(a)
    assert set(seen) == {key_of(Shown(), a)}


def test_another_process_builds_the_same_key():
    script = "from shown import *; print(key_of(Shown(), ones(), options={'b': (1, None), 'a': 2.0}, kind=Config()))"
    run = lambda seed: subprocess.run(
        [sys.executable, "-c", script],
        cwd=os.path.dirname(shown.__file__),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    here = key_of(Shown(), ones(), options={"a": 2.0, "b": (1, None)}, kind=Config())
    assert run("1") == run("2") == here


def test_a_star_in_a_name_is_no_leaf():
    keys = {key_of(Shown(), {"a*": a, "b": b}) for a in (1, 2) for b in (1, 2)}
    assert len(keys) == 4


def test_an_option_without_json_is_keyed_by_its_type():
    key = key_of(Shown(), ones(), option=object(), other={1: {2, 3}})
    assert "<object>" in key and " at 0x" not in key


def test_without_source_the_fingerprint_is_of_the_bytecode():
    made = {}
    for text in ("a", "a + 1", "a"):
        scope = {"Shown": Shown, "__name__": "nowhere"}
        exec(f"class Made(Shown):\n  def run(self, a, *, cfg):\n    return {text}", scope)
        made.setdefault(text, set()).add(scope["Made"]().source_fingerprint())
    assert len(made["a"]) == 1 and made["a"].isdisjoint(made["a + 1"])


@pytest.mark.parametrize("package", ["jax", "jaxlib", "triton", "jax-triton"])
def test_a_config_holds_for_the_packages_that_it_was_measured_with(package, monkeypatch):
    """Without jax-triton the kernels of Triton are no candidates, and where it is installed later they have to be."""
    versions = dict.fromkeys(("jax", "jaxlib", "triton", "jax-triton"), "1.0")

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    with_all = versions_fingerprint.__wrapped__()
    assert with_all == "jax 1.0, jaxlib 1.0, triton 1.0, jax-triton 1.0"
    del versions[package]
    assert versions_fingerprint.__wrapped__() == ", ".join(f"{name} 1.0" for name in versions)


# --- Sharding


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_sharding_of_an_array_and_of_its_type(axis_type):
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(axis_type,) * 2)
    place = lambda *spec: jax.device_put(ones(), NamedSharding(mesh, P(*spec)))
    texts = [sharding_fingerprint(place(*spec)) for spec in (("x",), (None, "x"), (("x", "y"),), ("x", "y"))]
    assert texts == ["x=2;P('x', None)", "x=2;P(None, 'x')", "x=2,y=2;P(('x', 'y'), None)", "x=2,y=2;P('x', 'y')"]
    assert sharding_fingerprint(place("x", None)) == texts[0] == sharding_fingerprint(abstract(place("x")))
    assert (
        sharding_fingerprint(place()) == sharding_fingerprint(ones()) == sharding_fingerprint(np.ones(3)) == "unsharded"
    )
    if axis_type is AxisType.Explicit:
        seen = []
        jax.jit(lambda a: seen.append(sharding_fingerprint(a)))(place("x"))
        assert seen == texts[:1]


def test_sharding_names_no_devices():
    first, last = (jax.make_mesh((2,), ("x",), devices=devices) for devices in (jax.devices()[:2], jax.devices()[-2:]))
    place = lambda mesh: jax.device_put(ones(), NamedSharding(mesh, P("x")))
    assert key_of(Shown(), place(first)) == key_of(Shown(), place(last))


def test_inside_shard_map_a_shard_is_an_array_like_others():
    mesh, seen = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), []
    inside = lambda a: (seen.append(key_of(Shown(), a)), a)[1]
    a = jax.device_put(ones(8, 4), NamedSharding(mesh, P("x")))
    jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(a)
    assert set(seen) == {key_of(Shown(), ones())}


def test_target_of_a_mesh_of_absent_devices():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert local_target() == Target("cuda", "NVIDIA H200") == Invocation(Shown(), (), {}).target


# --- JSON


class Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class Inner:
    blocks: tuple[int, ...] = (64, 128)


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    other: "Inner | None" = None
    window: tuple[int | None, int | None] = (None, 3)
    platform: Platform | str = "auto"
    colour: Colour = Colour.RED
    dtype: object = np.dtype("float32")
    scale: float = 1.0
    name: str | None = None
    pairs: tuple[tuple[int, int], ...] = ((1, 2),)
    axes: frozenset[int] = frozenset({1, 2})
    factor: float | int = 2
    total: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "total", sum(self.axes))


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(other=Inner(()), platform=Platform.TRITON, dtype=jnp.dtype("bfloat16"), scale=2.0, name="é", pairs=()),
    ],
)
def test_json_brings_every_value_back_as_it_was(config):
    for again in (from_json(to_json(config), Outer), unpack(pack(config))):
        assert again == config and hash(again) == hash(config) and repr(again) == repr(config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"no": 1}',
        '{"window": 3}',
        '{"window": [1]}',
        '{"scale": "x"}',
        '{"scale": [1.0]}',
        '{"axes": 3}',
        '{"name": 3}',
        '{"colour": 9}',
    ],
)
def test_invalid_json_of_a_config_is_a_value_error(text):
    with pytest.raises(ValueError):
        from_json(text, Outer)


def test_stable_json_is_the_same_for_the_same_value():
    assert stable_json({"b": (1, None), "a": {3, 1, 2}}) == '{"a":[1,2,3],"b":[1,null]}'
    assert len({stable_json(x) for x in (1, 1.0, True, "1", None, jnp.float32, jnp.bfloat16, Colour, Outer())}) == 9
    assert stable_json(jnp.float32) == stable_json(np.dtype("float32")) == stable_json(np.float32)


@pytest.mark.parametrize("value", [object(), 1j, ones])
def test_values_without_json_are_type_errors(value):
    with pytest.raises(TypeError, match="has no JSON"):
        to_json({"value": value})
