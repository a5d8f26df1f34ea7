"""Launches of Triton kernels: errors before anything compiles, and the order of imports."""

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._launch import launch
from ejkernel.types import KernelConfig, Target


@pytest.mark.parametrize("wrong", [dict(block_q=24), dict(block_k=8), dict(num_warps=3), dict(num_warps=64)], ids=str)
def test_sizes_that_triton_cannot_take(wrong):
    def kernel():
        raise AssertionError("it is not to be run")

    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"kernel: config.{name} is {value}; Triton needs a power of two"):
        launch(kernel, out_type=None, grid=1, config=KernelConfig(**wrong))


@pytest.mark.parametrize("capability", (80, 90, 100, 103, 110, 120, 121))
def test_every_assembler_of_jax_reads_the_ptx(monkeypatch, capability):
    """The assembler of CUDA 13.0, the oldest that jax-cuda13-plugin requires, reads PTX 9.0; Triton has a newer one."""
    jax_triton, told = pytest.importorskip("jax_triton"), {}
    monkeypatch.setattr(jax_triton, "triton_call", lambda *operands, **given: told.update(given))
    with lowering_for(Target("cuda", "a GPU", capability)):
        launch(SimpleNamespace(__name__="kernel"), out_type=None, grid=1, config=KernelConfig())
    assert 87 <= told["backend_options"]["ptx_version"] <= 90


# A kernel of Triton is read from a file.
LOWERED = """
import jax, jax.numpy as jnp, triton, triton.language as tl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.types import KernelConfig, Target

@triton.jit
def double(x, y):
    i = tl.arange(0, 16)
    tl.store(y + i, 2 * tl.load(x + i))

assert (reason := _launch.refusal(Target("cuda"))) is None, reason
x = jax.ShapeDtypeStruct((16,), jnp.float32)
double_p = Primitive("double")
double_p.def_abstract_eval(lambda x: x)
launch = lambda y: _launch.launch(double, y, out_type=x, grid=1, config=KernelConfig())
mlir.register_lowering(double_p, mlir.lower_fun(launch, multiple_results=False), platform="cuda")
print("triton_kernel_call" in jax.jit(double_p.bind).trace(x).lower(lowering_platforms=("cuda",)).as_text())
"""
IMPORTS = (
    "jax_triton, ejkernel",
    "triton, jax_triton, ejkernel",
    "ejkernel, jax_triton",
    "ejkernel, triton",
    "ejkernel",
)


def output(tmp_path, script: str) -> str:
    """The output of a new process."""
    (file := tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, file], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


@pytest.mark.parametrize("imports", IMPORTS)
def test_any_order_of_imports(tmp_path, imports):
    pytest.importorskip("jax_triton")
    assert output(tmp_path, f"import {imports}\n{LOWERED}") == "True\n"


# Attributes that a module gets, or changes, at the first use.
CHANGED = """
import sys, triton, triton.backends.nvidia.compiler, triton.backends.nvidia.driver, jax_triton, ejkernel

def contents(*packages):
    found = {(name, key): value for name, module in sys.modules.items() if name.split(".")[0] in packages
             for key, value in vars(module).items() if not key.startswith("__")}
    return {**found, ("required", ""): jax_triton.triton_lib.TensorDescMeta.__required_keys__}

def changed(before):
    after = contents("triton", "jax_triton")
    return {key for key in after if key[0] in loaded and after[key] is not before.get(key)} | (before.keys() - after)

loaded, before = {*sys.modules, "required"}, contents("triton", "jax_triton")
LOWER
lazy = {name for name in sys.modules if name not in loaded}
names = {(module, key) for module, key in changed(before) if f"{module}.{key}" not in lazy}
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    names = {(module, key) for module, key in names if module not in ("jax_triton.triton_lib", "required")}
print(sorted(names))
"""


def test_nothing_of_triton_is_changed_and_of_jax_triton_only_with_an_older_triton(tmp_path):
    pytest.importorskip("jax_triton")
    assert output(tmp_path, CHANGED.replace("LOWER", LOWERED)) == "True\n[]\n"


def stub(monkeypatch, version="0.4.1", **library):
    """A jax-triton in the place of the installed one."""
    module = ModuleType("jax_triton")
    module.__version__ = version
    module.triton_lib = SimpleNamespace(**{"cb": os, "hb": os, "triton_kernel_call_lib": os, **library})
    monkeypatch.setitem(sys.modules, "jax_triton", module)


def test_missing_requirements_of_triton_are_named(monkeypatch):
    """So that the next implementation runs."""
    cuda, rocm = Target("cuda"), Target("rocm", "gfx942")
    stub(monkeypatch)
    assert _launch.refusal(cuda) is None and _launch.refusal(rocm) is None
    stub(monkeypatch, hb=SimpleNamespace())
    assert _launch.refusal(cuda) is None
    assert _launch.refusal(rocm) == "jax-triton 0.4.1 has no backend for rocm with this Triton"
    stub(monkeypatch, cb=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", None)
    assert _launch.refusal(cuda) == "jax-triton 0.4.1 has no backend for cuda with this Triton"
    stub(monkeypatch, triton_kernel_call_lib=None)
    assert "a plugin such as jax-cuda13-plugin brings it" in _launch.refusal(cuda)
    stub(monkeypatch, version="0.3.1")
    assert "jax-triton 0.3.1 cannot leave operands out; 0.4 can" in _launch.refusal(cuda)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert "jax-triton cannot be used (ModuleNotFoundError: " in _launch.refusal(cuda)


def test_a_jax_triton_that_fails_to_import_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "jax_triton.py").write_text("import jax\njax.a_name_of_another_version")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    assert "jax-triton cannot be used (AttributeError: " in _launch.refusal(Target("cuda"))
