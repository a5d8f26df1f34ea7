"""The registry beyond its documented use: which errors the wrapper passes or converts, and its overhead."""

import inspect
import timeit
import warnings

import jax
import pytest

import ejkernel
from ejkernel.errors import EjkernelRuntimeError
from ejkernel.kernels._registry import KernelRegistry, kernel_registry, supported_if
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig


@pytest.fixture
def registry():
    return KernelRegistry()


def raising(registry, error):
    @registry.register("op", "xla", "any")
    def implementation(x):
        raise error

    return implementation


@pytest.mark.parametrize("error", [ValueError("v"), TypeError("t"), NotImplementedError("n"), KeyError("k")])
def test_errors_of_the_caller_pass_unchanged(registry, error):
    with pytest.raises(type(error)) as raised:
        raising(registry, error)(0)
    assert raised.value is error


def test_errors_of_tracing_pass_unchanged(registry):
    @registry.register("op", "xla", "any")
    def branches_on_a_value(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(branches_on_a_value)(1.0)


def test_a_failure_of_the_runtime_is_converted_with_its_cause(registry):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(EjkernelRuntimeError, match=r"op \(xla\).*RESOURCE_EXHAUSTED") as raised:
        raising(registry, error)(0)
    assert raised.value.__cause__ is error


def test_a_failure_of_triton_is_converted(registry):
    errors = pytest.importorskip("triton.runtime.errors")
    with pytest.raises(EjkernelRuntimeError, match="out of resource"):
        raising(registry, errors.OutOfResources(300_000, 200_000, "shared memory"))(0)


def test_a_failure_of_mlir_is_converted(registry):
    from jax.extend.mlir import ir

    @registry.register("op", "xla", "any")
    def parses_nonsense(x):
        with ir.Context():
            return ir.Module.parse("this is no module")

    with pytest.raises(EjkernelRuntimeError, match="MLIRError"):
        parses_nonsense(0)


@pytest.mark.usefixtures("strict")
def test_an_implementation_may_promote_where_its_caller_forbids_it(registry):
    @registry.register("op", "xla", "any")
    def implementation(x, y):
        return x + y

    mixed = jax.numpy.ones((2, 3), "bfloat16"), jax.numpy.ones(3, "float32")
    assert implementation(*mixed).shape == (2, 3)
    with pytest.raises((TypeError, ValueError)):
        mixed[0] + mixed[1]


def test_an_unknown_keyword_is_named_with_those_accepted(registry):
    @registry.register("op", "xla", "any")
    def implementation(q, k, *, causal=False):
        return q

    with pytest.raises(TypeError, match=r"op \(xla\): unsupported argument softcap; accepted are causal, k, q"):
        implementation(1, 2, softcap=3.0)


def test_an_implementation_that_takes_all_keywords_gets_them(registry):
    @registry.register("op", "xla", "any")
    def implementation(q, **options):
        return options

    assert implementation(1, softcap=3.0) == {"softcap": 3.0}


def test_a_registered_function_has_its_supports(registry):
    @registry.register("op", "xla", "any")
    @supported_if(lambda spec, operands, target: f"not on {target}")
    def limited(q): ...

    @registry.register("op", "pallas", "tpu")
    def unlimited(q): ...

    reasons = [s.implementation.supports(None, (), "cpu") for s in registry.list_implementations("op")]
    assert reasons == ["not on cpu", None]


def test_the_source_of_an_implementation_can_be_read(registry):
    implementation = raising(registry, ValueError())
    assert "raise error" in inspect.getsource(implementation)


def test_the_first_of_equal_priority_wins(registry):
    registry.register("op", "xla", "any")(lambda x: "first")
    registry.register("op", "triton", "gpu")(lambda x: "second")
    assert registry.get("op")(0) == "first"


def test_the_error_of_a_miss_lists_registered_implementations(registry):
    registry.register("op", "triton", "gpu")(lambda x: x)
    with pytest.raises(ValueError, match=r"platform xla and backend tpu; registered: triton/gpu"):
        registry.get("op", "xla", "tpu")


def test_string_annotations_are_resolved(registry):
    @registry.register("op", "xla", "any")
    def typed(q: jax.Array, scale: float | None = None): ...

    @registry.register("op", "triton", "gpu")
    def named(q: "jax.Array", scale: "float | None" = None): ...

    @registry.register("op", "pallas", "tpu")
    def known_to_type_checkers_alone(q: "jax.Array", scale: "float | None" = None, *, config: "Unknown" = None): ...  # noqa: F821

    with pytest.warns(UserWarning, match="pallas/tpu takes") as warned:
        assert registry.validate_signatures("op") is False
    assert len(warned) == 1


def test_a_mismatch_says_what_differs(registry):
    registry.register("op", "xla", "any", 1)(lambda q, scale=1.0: q)
    registry.register("op", "triton", "gpu")(lambda q, scale=2.0: q)
    with pytest.warns(
        UserWarning, match=r"op: triton/gpu differs from xla/any in the default of scale: 2.0 against 1.0"
    ):
        registry.validate_signatures("op")


def test_agreement_is_silent(registry):
    for platform in ("xla", "triton", "pallas"):
        registry.register("op", platform, "any")(lambda q, k: q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.validate_signatures("op") is True


def test_the_wrapper_costs_as_little_as_twenty_five_empty_calls(registry, types_unchecked):
    """About a microsecond."""
    implementation = registry.register("op", "xla", "any")(lambda q, *, causal=False: q)
    bare = inspect.unwrap(implementation)
    cost = lambda f: min(timeit.repeat(lambda: f(1, causal=True), number=200, repeat=50)) / 200
    assert cost(implementation) < 25 * cost(bare)


ASKED = [{}, {"platform": "auto"}, {"platform": "xla"}, {"backend": "cpu"}, {"platform": "xla", "backend": "any"}]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_an_operation_is_given_under_its_documented_arguments(asked):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 8, heads, 4)) for i, heads in enumerate((4, 2, 2)))
    attention = kernel_registry.get("flash_attention", **asked)
    wanted = ejkernel.lax.flash_attention(q, k, v, causal=True, window=3)
    assert (attention(q, k, v, causal=True, sliding_window=3) == wanted).all()
    assert attention.__doc__ == ejkernel.modules.flash_attention.__doc__


@pytest.mark.parametrize("asked", [{"backend": "tpu"}, {"platform": "xla", "backend": "gpu"}], ids=str)
def test_an_operation_of_another_backend_does_not_run_here(asked):
    x = jax.numpy.ones((1, 8, 2, 4))
    attention = kernel_registry.get("flash_attention", **asked)
    says = f"flash_attention: asked for on backend {asked['backend']}, and this process computes on cpu"
    with pytest.raises(ValueError, match=says):
        attention(x, x, x)


@pytest.mark.parametrize(
    "operation, call",
    [
        ("merge_attention", "ejkernel.lax.merge_attention"),
        ("Ring_Attention", "ejkernel.modules.ring_attention"),
        ("unified_attention", "ejkernel.modules.unified_attention"),
    ],
)
def test_a_composed_operation_has_no_implementation(operation, call):
    says = f"{operation} is composed of other operations and has no implementation of its own; call {call}$"
    for ask in (kernel_registry.get, kernel_registry.find, ejkernel.modules.detect_platform):
        for platform in ("xla", "auto"):
            with pytest.raises(ValueError, match=says):
                ask(operation, platform)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_is_given_on_every_platform(operation):
    """For platforms without a device here, the returned function can still be traced."""
    pytest.importorskip("jax_triton")
    example, names = OPERATIONS[operation].example(), OPERATIONS[operation].renamed
    arrays = {names.get(name, name): x for name, x in example.items() if hasattr(x, "shape")}
    options = {names.get(name, name): x for name, x in example.items() if not hasattr(x, "shape")}
    types_of = lambda function: jax.eval_shape(lambda given: function(**given, **options), arrays)
    for entry in kernel_registry.list_implementations(operation):
        given = kernel_registry.get(operation, entry.platform, entry.backend)
        assert types_of(given) == types_of(getattr(ejkernel.modules, operation))


def test_the_implementation_itself_is_found():
    found = kernel_registry.find("flash_attention", "xla")
    x = jax.random.normal(jax.random.key(0), (1, 4, 1, 8))
    o = found.implementation(x, x, x, spec=FlashAttentionSpec(softmax_scale=8**-0.5), config=KernelConfig()).o
    assert found.platform == "xla" and (abs(o - ejkernel.lax.flash_attention(x, x, x)) < 1e-6).all()
