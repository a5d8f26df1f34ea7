"""Lowered kernels are kept on disk: a process that finds one there neither traces nor compiles it."""

import gc
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest
from ejkernel.lowering import _stored

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.ops import Invocation, extract_labels_from_hlo_text
from ejkernel.ops.core import programs
from ejkernel.types import KernelConfig, Target
from ejkernel.xla_utils.garbage_collection import no_garbage_collection
from tests.kernels.mosaic import CUSTOM_CALL

TRITON = KernelConfig(platform="triton", block_q=64, block_k=64)
MOSAIC = KernelConfig(platform="pallas", block_q=128, block_k=128)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The names of kernels that are lowered rather than found."""
    found, make = [], _stored._made
    monkeypatch.setattr(_stored, "_made", lambda kernel, avals: found.append(kernel.name) or make(kernel, avals))
    return found


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    return lambda: sorted((tmp_path / "lowered").glob("*"))


def traced(rows=256, config=TRITON, **options):
    """A program traced by a new process."""
    jax.clear_caches()
    _stored._in_memory.clear()
    x = jax.ShapeDtypeStruct((1, rows, 2, 64), jnp.bfloat16)
    return jax.jit(lambda x: ejkernel.lax.flash_attention(x, x, x, config=config, **options)).trace(x)


def lowered(**options):
    return traced(**options).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    "config, call",
    [(TRITON, "triton_kernel_call_ffi"), (MOSAIC, CUSTOM_CALL)],
    ids=["triton", "mosaic"],
)
def test_a_kernel_is_lowered_once(files, made, config, call):
    first = lowered(config=config).as_text()
    assert made == ["flash_attention"] and len(files()) == 1 and call in first
    assert lowered(config=config).as_text() == first and made == ["flash_attention"]


@pytest.fixture
def begun(monkeypatch):
    """The kernels whose compilation begins while the program around them is lowered, as on a host with the target."""
    found = []
    monkeypatch.setattr(programs, "started_outside_any_trace", lambda work: found.append(work.__self__))
    monkeypatch.setattr(_stored, "device_target", lambda: Target("cuda"))
    return found


@pytest.mark.parametrize("config, expected", [(MOSAIC, 1), (TRITON, 0)], ids=["mosaic", "triton"])
def test_a_kernel_that_xla_compiles_is_compiled_ahead(files, begun, config, expected):
    for _ in range(2):
        lowered(config=config)
        assert len(begun) == expected, "a kernel on disk may be in a program that is compiled already"
    assert all(CUSTOM_CALL in kernel.as_text() for kernel in begun)


def test_a_candidate_of_a_search_is_not_compiled_ahead(files, begun, types_unchecked):
    class Candidate:
        def bind(self, args, kwargs, config):
            lowered(config=config)
            return args

    programs.lowered(Candidate(), Invocation(None, (), {}), MOSAIC)
    assert len(files()) == 1 and not begun


def test_a_kernel_for_another_target_is_not_compiled_ahead(files, begun, monkeypatch):
    monkeypatch.setattr(_stored, "device_target", lambda: Target("cpu"))
    lowered(config=MOSAIC)
    assert len(files()) == 1 and not begun


def test_once_for_each_thing_that_it_depends_on(files, made, monkeypatch):
    for n, call in enumerate((dict(), dict(causal=True), dict(rows=512), dict(config=None)), 1):
        lowered(**call)
        assert len(made) == len(files()) == n, call
    monkeypatch.setattr(_stored, "_source", lambda: "edited")
    lowered()
    monkeypatch.setattr(_stored, "_versions", lambda: "another jax")
    lowered()
    assert len(made) == len(files()) == 6


def test_two_layers_share_one_and_a_gradient_takes_two(files, made):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    attention = lambda x: ejkernel.lax.flash_attention(x, x, x, causal=True)
    gradient = jax.jit(jax.grad(lambda x: attention(attention(x)).astype(jnp.float32).sum()))
    gradient.trace(x).lower(lowering_platforms=("cuda",))
    assert sorted(made) == ["flash_attention", "flash_attention_bwd"] and len(files()) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-5], lambda content: b"", lambda content: b"x" + content])
def test_a_damaged_file_causes_a_warning(files, made, damage):
    first = lowered().as_text()
    (file,) = files()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged; the kernel is lowered again"):
        assert lowered().as_text() == first
    assert lowered().as_text() == first and len(made) == 2


def age(file, seconds):
    os.utime(file, (time.time() - seconds,) * 2)


def test_those_that_were_not_used_for_the_longest_time_are_removed_first(files, monkeypatch):
    _stored._write((folder := Path(os.environ["EJKERNEL_CACHE_DIR"], "lowered")) / "a", b"a")
    size = files()[0].stat().st_size
    monkeypatch.setattr(_stored, "LIMIT", 3 * size)
    for seconds, name in ((300, "a"), (200, "b"), (100, "c")):
        _stored._write(folder / name, b"a")
        age(folder / name, seconds)
    assert _stored._read(folder / "a") == b"a"
    _stored._write(folder / "d", b"a")
    assert [file.name for file in files()] == ["a", "c", "d"]
    _stored._write(folder / "e", b"a")
    assert [file.name for file in files()] == ["a", "d", "e"]


def test_two_processes_may_remove_the_same(files, monkeypatch):
    _stored._write((folder := Path(os.environ["EJKERNEL_CACHE_DIR"], "lowered")) / "a", b"a")
    age(folder / "a", 100)
    monkeypatch.setattr(_stored, "LIMIT", files()[0].stat().st_size)
    remove = os.remove
    monkeypatch.setattr(_stored.os, "remove", lambda path: remove(path) or remove(path))  # the other process was faster
    _stored._write(folder / "b", b"a")
    assert [file.name for file in files()] == ["b"]


def test_an_unwritable_directory_is_harmless(tmp_path, monkeypatch, made):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    assert "triton_kernel_call_ffi" in lowered().as_text() and len(made) == 1


def test_a_stored_kernel_has_its_label(files, made):
    for _ in range(2):
        (label,) = extract_labels_from_hlo_text(lowered().as_text(debug_info=True))
        assert label == "ejkernel[op=flash_attention;impl=triton]"
    assert len(made) == 1


def test_registrations_of_users_are_not_stored(files, made, monkeypatch):
    found = kernel_registry.list_implementations("flash_attention")
    entry = [of.implementation for of in found if of.platform == "triton"][-1]  # those before it take few queries
    monkeypatch.setattr(getattr(entry, "implementation", entry), "__module__", "mine")
    assert "triton_kernel_call_ffi" in lowered().as_text() and not made and not files()


def test_export_and_the_cpu_store_nothing(files, made):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    attention = jax.jit(lambda x: ejkernel.lax.flash_attention(x, x, x))
    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    checks += [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    jax.export.export(attention, platforms=("cpu", "cuda"), disabled_checks=checks)(x)
    attention.trace(x).lower(lowering_platforms=("cpu",))
    assert not made and not files()


def test_the_runtime_of_mosaic_is_found_where_its_import_finds_it():
    told = """
        import os, sys
        before = set(os.environ)
        if sys.argv[1] == "import":
            import jax.experimental.mosaic.gpu
        else:
            from ejkernel.compat import find_mosaic_runtime
            find_mosaic_runtime()
        found = set(os.environ) - before
        print(sorted((name, os.environ[name]) for name in found if name.startswith("MOSAIC") and "SHMEM" not in name))
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOSAIC")}

    def run(how):
        command = [sys.executable, "-c", textwrap.dedent(told), how]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run("import") == run("find") != "[]\n"


def test_a_kernel_asks_for_the_version_of_ptxas_once(files):
    """Mosaic asks at each conversion of a boolean, and a causal mask has several."""
    from jax._src.lib import mosaic_gpu

    from ejkernel.compat import ask_ptxas_once

    ask_ptxas_once()
    asked = mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version
    before = asked.cache_info()
    lowered(config=KernelConfig(platform="pallas", block_q=128, block_k=128), causal=True)
    assert asked.cache_info().hits > before.hits and asked.cache_info().misses <= 1


def test_no_garbage_is_collected_while_a_kernel_is_lowered(files, monkeypatch):
    found, make = [], jax.jit
    monkeypatch.setattr(_stored.jax, "jit", lambda *a, **k: found.append(gc.isenabled()) or make(*a, **k))
    lowered()
    assert False in found and gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_garbage_collection():
        1 / 0  # noqa: B018
    assert gc.isenabled()
