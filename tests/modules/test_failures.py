"""Errors of an implementation that fails in lowering say which one, in which versions, and how to exclude it."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import ejkernel
from ejkernel.errors import EjkernelRuntimeError, UnsupportedError
from ejkernel.kernels._registry import kernel_registry

X = np.ones((8, 4, 3), np.float32)


@pytest.fixture
def failing(monkeypatch):
    """`failing(operation, error, late)` registers an implementation that raises; if late, when it is lowered."""
    monkeypatch.setattr(kernel_registry, "_registry", dict(kernel_registry._registry))

    def register(operation, error, late):
        fails_p = Primitive("fails")
        fails_p.def_abstract_eval(lambda x: x)

        def fail(*_):
            raise error

        mlir.register_lowering(fails_p, fail)
        computes = kernel_registry.find(operation, "xla").implementation

        @kernel_registry.register(operation, "pallas", "cpu", priority=1000)
        def implementation(*args, **kwargs):
            if not late:
                raise error
            return jax.tree.map(fails_p.bind, computes(*args, **kwargs))

    return register


def pooled(x, **how):
    return ejkernel.lax.mean_pooling(x, chunk_size=2, **how)


def causes(error):
    while error := error.__cause__:
        yield error


def over(kind, mode):
    """The call over eight devices with mesh axes of a type, inside `shard_map` for Manual."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    spec = PartitionSpec("x")
    call = jax.shard_map(pooled, mesh=mesh, in_specs=spec, out_specs=spec) if mode == "shard_map" else pooled
    with jax.set_mesh(mesh):
        jax.jit(call)(jax.device_put(X, jax.NamedSharding(mesh, spec)))


ERRORS = {
    "missing attribute": AttributeError("'_Stub' object has no attribute 'backend'"),
    "failed assertion": AssertionError(),
    "missing module": ModuleNotFoundError("No module named 'triton'"),
    "runtime": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
}
# While a program is lowered, an error can no longer be due to the caller's arguments: jax-triton and Pallas report
# then that they cannot compile a kernel.
LATE_ERRORS = {"compiler": ValueError("TTIR->TTGIR pass failed!"), "lowering": NotImplementedError("Unimplemented")}
FAILURES = [pytest.param(error, late, id=f"{name}, late={late}") for name, error in ERRORS.items() for late in (0, 1)]
FAILURES += [pytest.param(error, True, id=name) for name, error in LATE_ERRORS.items()]
CALLS = {
    "mean_pooling": jax.jit(lambda x: pooled(x)),
    "mean_pooling_bwd": lambda x: jax.grad(lambda x: pooled(x).sum())(x),
    "mean_pooling_jvp": lambda x: jax.jvp(pooled, (x,), (x,)),
}


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("error, late", FAILURES)
def test_the_implementation_is_named_and_the_way_past_it(failing, operation, error, late):
    failing(operation, error, late)
    jax.clear_caches()
    with pytest.raises(EjkernelRuntimeError) as raised:
        CALLS[operation](X)
    first, versions, *others = str(raised.value).splitlines()
    assert (
        first == f"{operation}: pallas/cpu failed while it was lowered for cpu (cpu): {type(error).__name__}: {error}"
    )
    assert versions.startswith(f"versions: jax {jax.__version__}, jaxlib ")
    way = "ejkernel.lax.mean_pooling(…, config={'platform': 'xla'}) or ejkernel.modules.mean_pooling(…, platform='xla')"
    assert others == [f"xla takes this call too: {way}"]
    assert error in causes(raised.value)


def test_the_setting_that_the_error_suggests_works(failing):
    right = jax.value_and_grad(lambda x: pooled(x).sum())(X)
    for operation in CALLS:
        failing(operation, AttributeError(), True)
    jax.clear_caches()
    by_modules = lambda x: ejkernel.modules.mean_pooling(x, chunk_size=2, platform="xla")
    for call in (by_modules, lambda x: pooled(x, config={"platform": "xla"})):
        jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(lambda x, call=call: call(x).sum())(X), right)
        assert (jax.jvp(call, (X,), (X,))[1] == 1).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind, mode", [(AxisType.Explicit, ""), (AxisType.Auto, "shard_map"), (AxisType.Auto, "")])
def test_over_devices(failing, kind, mode, late):
    """Where XLA partitions the program it also lowers it, and raises its own error with this text."""
    failing("mean_pooling", AttributeError("no backend"), late)
    jax.clear_caches()
    by_xla = late and kind == AxisType.Auto and not mode
    with pytest.raises(jax.errors.JaxRuntimeError if by_xla else EjkernelRuntimeError) as raised:
        over(kind, mode)
    assert "mean_pooling: pallas/cpu failed while it was lowered for cpu (cpu): AttributeError: no" in str(raised.value)
    assert "config={'platform': 'xla'}" in str(raised.value)


@pytest.mark.parametrize("error", [ValueError("v"), TypeError("t"), NotImplementedError("n"), UnsupportedError("u")])
def test_errors_of_the_call_pass_unchanged(failing, error):
    failing("mean_pooling", error, False)
    jax.clear_caches()
    with pytest.raises(type(error)) as raised:
        CALLS["mean_pooling"](X)
    assert raised.value is error


def test_unsupported_errors_pass_unchanged(failing):
    failing("mean_pooling", UnsupportedError("u"), True)
    jax.clear_caches()
    with pytest.raises(UnsupportedError, match=r"^u"):
        CALLS["mean_pooling"](X)


def test_without_another_implementation_none_is_suggested(failing):
    failing("mean_pooling", AttributeError(), True)
    (ours, *_) = kernel_registry.list_implementations("mean_pooling")
    kernel_registry._registry["mean_pooling"] = [ours]
    jax.clear_caches()
    with pytest.raises(EjkernelRuntimeError) as raised:
        CALLS["mean_pooling"](X)
    assert len(str(raised.value).splitlines()) == 2


def test_triton_is_among_the_versions_where_it_is_loaded(failing, monkeypatch):
    for name in ("triton", "jax_triton"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=f"9 of {name}"))
    failing("mean_pooling", AttributeError(), True)
    jax.clear_caches()
    with pytest.raises(EjkernelRuntimeError, match="triton 9 of triton, jax-triton 9 of jax_triton\n"):
        CALLS["mean_pooling"](X)
