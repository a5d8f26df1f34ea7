"""A call recorded by one process is measured by another and read from a table by a third; files are never executed."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shown import HEURISTIC, OTHER, TUNED, Shown, executor, key_of, ones, ran

import ejkernel
from ejkernel.ops import (
    Invocation,
    PersistentCache,
    autotune_recorded,
    default_executor,
    load_invocations,
    load_table,
    merge_tables,
    overlay_cache,
    record_invocation,
    recording,
    save_invocations,
)
from ejkernel.ops.config.tables import SHIPPED
from ejkernel.ops.utils.packing import pack_tree, unpack_tree


@pytest.fixture(autouse=True)
def quiet():
    """Makes warnings errors except where a test expects one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    monkeypatch.setattr("ejkernel.ops.registry._recorded", {})


def invocations(calls):
    return [Invocation(*call) for of_operation in calls.values() for call in of_operation.values()]


def there_and_back(path, *calls):
    """The invocations read from a file in which the calls were saved, in the order of their operations."""
    for inv in calls:
        record_invocation(inv.kernel, inv)
    save_invocations(path)
    return sorted(invocations(load_invocations(path)), key=lambda inv: inv.kernel.name)


# --- From a program to a table


PROGRAM = """
    import jax, jax.numpy as jnp, ejkernel
    from shown import *
    run = executor(autotune=False)
    q = jnp.ones((1, 16, 2, 16))
    attention = lambda q: ejkernel.lax.flash_attention(q, q, q, causal=True, window=(8, None)).sum()
    jax.jit(lambda a, q: (run(Shown(), a), jax.grad(attention)(q)))(ones(), q)
"""


def test_recorded_under_jit_then_tuned_then_used(tmp_path):
    file, directory = tmp_path / "calls.json", tmp_path / "configs"
    environment = {**os.environ, "EJKERNEL_OPS_RECORD": str(file), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, check=True)

    calls = load_invocations(file)
    names = {"shown@v1", "flash_attention@v1", "flash_attention_jvp@v1", "flash_attention_bwd@v1"}
    assert calls.keys() == names

    cache = PersistentCache(directory)
    configs = autotune_recorded({"shown@v1": calls["shown@v1"]}, executor(persistent=cache))
    assert list(configs.values()) == [TUNED]

    events = []
    tell = lambda event, *_: events.append(event)
    merge_tables([cache.path_of()], table := tmp_path / "table" / "merged.json")
    assert ran(executor(persistent=PersistentCache(directory), autotune=False, on_event=tell)(Shown(), ones())) == TUNED
    assert ran(executor(tables=[PersistentCache(directory)], autotune=False, on_event=tell)(Shown(), ones())) == TUNED
    with overlay_cache(load_table(table)):
        assert ran(executor(autotune=False, on_event=tell)(Shown(), ones())) == TUNED
    assert events == ["persistent_hit", "table_hit", "overlay_hit"]


def test_a_gradient_is_recorded_with_its_tangent_and_backward():
    q = jax.ShapeDtypeStruct((1, 16, 2, 16), jnp.float32)
    with recording() as calls:
        jax.eval_shape(jax.grad(lambda q: ejkernel.lax.flash_attention(q, q, q).sum()), q)
        with recording() as inner:
            pass
    jax.eval_shape(lambda q: ejkernel.lax.flash_attention(q, q, q), q)
    assert sorted(calls) == ["flash_attention@v1", "flash_attention_bwd@v1", "flash_attention_jvp@v1"]
    assert all(len(of_operation) == 1 for of_operation in calls.values()) and inner == {}


# --- What a file holds


def test_a_built_in_call_has_the_same_key_in_a_file(tmp_path):
    q = jax.ShapeDtypeStruct((1, 16, 2, 16), jnp.bfloat16)
    options = dict(causal=True, window=(8, None), softcap=30.0)
    with recording() as calls:
        jax.eval_shape(
            jax.grad(lambda q: ejkernel.lax.flash_attention(q, q, q, **options).astype(jnp.float32).sum()), q
        )
    before = sorted(invocations(calls), key=lambda inv: inv.kernel.name)
    after = there_and_back(tmp_path / "calls.json", *before)
    assert len(after) == 3
    for ours, theirs in zip(before, after, strict=True):
        assert ours.kernel is theirs.kernel and ours.kwargs == theirs.kwargs
        assert ours.kernel.key_builder(ours) == theirs.kernel.key_builder(theirs)


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...]
    dtype: object = None


def test_a_call_of_a_users_kernel_has_the_same_key_in_a_file(tmp_path):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    laid_out = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(None, ("x", "y"))))
    inv = Invocation(
        Shown("users"),
        (laid_out, [jnp.int8(3), None], {"key": jax.random.key(0), "weak": 1.0 * jnp.ones(())}),
        {
            "options": Options((1, 2), jnp.dtype("bfloat16")),
            "dtype": jnp.dtype("float8_e4m3fn"),
            "rate": 0.5,
            "on": True,
        },
    )
    (found,) = there_and_back(tmp_path / "calls.json", inv)
    assert found.kernel == inv.kernel and found.kwargs == inv.kwargs
    assert found.kernel.key_builder(found) == inv.kernel.key_builder(inv)
    assert "x=2,y=4;P(None, ('x', 'y'))" in found.call_key


@pytest.mark.parametrize("algorithm", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_algorithm_and_dtypes_are_packed(algorithm):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=algorithm))
    for value in (key, jnp.bfloat16, jnp.dtype("bfloat16")):
        assert repr(unpack_tree(json.loads(json.dumps(pack_tree(value))))) == repr(value)


def test_calls_without_json_are_left_out_with_a_warning(tmp_path):
    class Holding(Shown):
        def __init__(self):
            super().__init__("holding")
            self.table = ones()

    strange = Invocation(Shown("strange"), (ones(),), {"activation": jnp.tanh})
    with pytest.warns(UserWarning, match=r"a call of .* is left out: .*(cannot be written|holds arrays)") as warned:
        found = there_and_back(tmp_path / "calls.json", strange, Invocation(Holding(), (ones(),), {}), shown_call())
    assert [inv.kernel.name for inv in found] == ["shown"] and len(warned) == 2


def shown_call(name="shown"):
    return Invocation(Shown(name), (ones(),), {})


def test_a_call_of_a_class_that_is_not_imported_is_left_out_and_nothing_is_imported(tmp_path):
    there_and_back(file := tmp_path / "calls.json", shown_call("here"), shown_call("there"))
    content = json.loads(file.read_text())
    changed = next(entry for entry in content["calls"].values() if entry["operation"] == "there@v1")
    for name in ("antigravity:Kernel", "os:system", "shown:Config", "ejkernel.ops:ConfigCache"):
        changed["kernel"]["class"] = name
        file.write_text(json.dumps(content))
        with pytest.warns(UserWarning, match=f"there@v1 is left out: the kernel {name} is not imported here"):
            assert list(load_invocations(file)) == ["here@v1"]
    assert "antigravity" not in sys.modules


def test_files_are_added_to_and_may_be_asked_for_one_device(tmp_path, monkeypatch):
    file = tmp_path / "calls.json"
    record_invocation("gpu|NVIDIA H200", "shown@v1", "elsewhere", Shown(), (ones(),), {})
    save_invocations(file)
    monkeypatch.setattr("ejkernel.ops.registry._recorded", {})
    assert [inv.kernel.name for inv in there_and_back(file, shown_call("other"))] == ["other", "shown"]
    assert load_invocations(file, "gpu|NVIDIA H200").keys() == {"shown@v1"}
    assert load_invocations(file, "tpu|TPU v5e") == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "ejkernel configs 1", "configs": {}}'])
def test_a_foreign_file_is_an_error_and_is_not_changed(tmp_path, content):
    (file := tmp_path / "notes.json").write_text(content)
    with pytest.raises(ValueError):
        load_invocations(file)
    with pytest.raises(ValueError):
        save_invocations(file)
    assert file.read_text() == content
    with pytest.raises(FileNotFoundError):
        load_invocations(tmp_path / "none.json")


@pytest.mark.parametrize(
    "entry", [None, 3, {}, {"operation": []}, {"kernel": 3}, {"args": {"array": {}}}, {"kwargs": {"": 1}}]
)
def test_a_damaged_entry_is_left_out(tmp_path, entry):
    there_and_back(file := tmp_path / "calls.json", shown_call("whole"), shown_call("damaged"))
    content = json.loads(file.read_text())
    (key,) = (key for key in content["calls"] if "damaged" in key)
    content["calls"][key] = content["calls"][key] | entry if isinstance(entry, dict) and entry else entry
    file.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="is left out"):
        assert list(load_invocations(file)) == ["whole@v1"]


def test_at_exit_an_unwritable_file_causes_a_warning(tmp_path, monkeypatch):
    (notes := tmp_path / "notes.json").write_text("mine")
    at_exit = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", str(notes))
    for _ in range(2):
        executor(autotune=False)(Shown(), ones())
    (save,) = at_exit
    with pytest.warns(UserWarning, match="the recorded calls are lost"):
        save()
    assert notes.read_text() == "mine"


# --- Tables


def table_of(directory, **configs):
    """A table with a config for each kernel of that name."""
    cache = PersistentCache(directory)
    for name, config in configs.items():
        cache.put(key_of(Shown(name), ones()), config)
    return cache.path_of()


def test_of_several_tables_the_last_is_used(tmp_path):
    first = table_of(tmp_path / "first", both=OTHER, one=OTHER)
    second = table_of(tmp_path / "second", both=TUNED)
    out = tmp_path / "out.json"
    assert merge_tables([first], out) == 2 and merge_tables([second], out) == 1
    with overlay_cache(load_table(out)):
        assert ran(executor(autotune=False)(Shown("both"), ones())) == TUNED
        assert ran(executor(autotune=False)(Shown("one"), ones())) == OTHER


def test_configs_of_unknown_classes_are_merged_and_not_loaded(tmp_path):
    content = json.loads(Path(table_of(tmp_path / "known", known=TUNED)).read_text())
    content["configs"]["theirs"] = {"class": "antigravity:Config", "config": {}}
    (theirs := tmp_path / "theirs.json").write_text(json.dumps(content))
    assert merge_tables([theirs], out := tmp_path / "out.json") == 2
    assert len(load_table(out)) == 1 and "antigravity" not in sys.modules


def test_a_damaged_table_is_an_error_and_nothing_is_written(tmp_path):
    good = table_of(tmp_path / "good", known=TUNED)
    (bad := tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError):
        load_table(bad)
    with pytest.raises(ValueError):
        merge_tables([good, bad], tmp_path / "out.json")
    with pytest.raises(ValueError):
        merge_tables([good], bad)
    assert not (tmp_path / "out.json").exists() and bad.read_text() == "{"


# --- Shipped


def test_a_shipped_table_is_read_after_the_users_and_before_heuristics(tmp_path, monkeypatch):
    shipped = PersistentCache(tmp_path / "shipped")
    monkeypatch.setattr(default_executor().selector, "tables", [PersistentCache(tmp_path / "absent"), shipped])
    table_of(tmp_path / "shipped", first=OTHER, second=OTHER)
    PersistentCache().put(key_of(Shown("second"), ones()), TUNED)
    assert [ran(Shown(name)(ones())) for name in ("first", "second", "third")] == [OTHER, TUNED, HEURISTIC]
    assert not (tmp_path / "absent").exists()


def test_a_stale_shipped_table_is_passed_over(tmp_path, monkeypatch):
    table_of(tmp_path / "shipped", stale=OTHER)
    monkeypatch.setattr("ejkernel.ops.utils.fingerprints.versions_fingerprint", lambda: "jax 99")
    run = executor(tables=[PersistentCache(tmp_path / "shipped")], autotune=False)
    assert ran(run(Shown("stale"), ones())) == HEURISTIC


def test_the_tables_of_the_library_stand_in_its_modules():
    directory = os.path.join(os.path.dirname(ejkernel.modules.__file__), "tuned")
    assert os.path.dirname(SHIPPED.path_of("gpu|NVIDIA H200")) == directory
    assert default_executor().selector.tables == (SHIPPED,)
    for name in os.listdir(directory):
        load_table(os.path.join(directory, name))
