"""A given executor or platform applies to the whole call, its tangents and gradients included."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, PLAIN, each, first_of_each, with_primitives
from jax.sharding import AxisType, PartitionSpec
from programs import equations

import ejkernel
from ejkernel.errors import UnsupportedError
from ejkernel.kernels import _dispatch
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    find_labels_in_lowered,
    label_fields,
)
from ejkernel.types import KernelConfig
from ejkernel.types.recurrence import RecurrenceConfig

OURS = with_primitives(CASES)
each_operation = each(first_of_each([case for case in OURS if case.differentiable]), first=())


def platforms_of(operation: str) -> set[str]:
    """The platforms for which an operation has implementations."""
    return {entry.platform for entry in kernel_registry.list_implementations(operation)}


@pytest.fixture
def no_default(monkeypatch):
    """Makes any request to the default executor for a config that is not stored an error."""
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "error")


def listening():
    """An executor that uses heuristics, and the operations for which it was asked for a config."""
    asked = []
    chain = ConfigSelectorChain(
        cache=ConfigCache(),
        policy=AutotunePolicy(allow_autotune=False),
        on_event=lambda event, operation, key, config: asked.append(operation.partition("@")[0]),
    )
    return Executor(chain), asked


def loss_of(executor, case):
    """A scalar function of the case's differentiable arrays, computed from its results, and these arrays."""
    operation, names = OPERATIONS[case.operation], OPERATIONS[case.operation].renamed
    arrays = case.arrays()
    moving = {name: arrays.pop(name) for name in case.differentiable}

    def loss(moving):
        given = {names.get(n, n): x for n, x in {**arrays, **moving, **case.options}.items()}
        return sum(jnp.sum(x) for x in jax.tree.leaves(executor(operation(), **given)))

    return loss, moving


@each_operation
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_the_backward_is_chosen_by_the_executor_of_its_forward(case, jit, no_default):
    executor, asked = listening()
    loss, moving = loss_of(executor, case)
    gradient = jax.grad(loss)
    (jax.jit(gradient) if jit else gradient)(moving)
    name = case.operation
    assert {name, f"{name}_jvp", f"{name}_bwd"} == set(asked)


@each_operation
def test_transformed_calls_use_the_executor(case, no_default):
    """vmap of the gradient, and the gradient of the gradient: the executor remains a parameter of every primitive."""
    executor, asked = listening()
    loss, moving = loss_of(executor, case)
    twice = lambda moving: sum(jnp.sum(x**2) for x in jax.tree.leaves(jax.grad(loss)(moving)))
    jax.eval_shape(jax.vmap(jax.grad(twice)), {n: jnp.stack([x, x]) for n, x in moving.items()})
    assert f"{case.operation}_bwd" in asked


def test_two_executors_are_two_programs(no_default):
    case = PLAIN["mean_pooling"]
    heard = []
    for _ in range(2):
        executor, asked = listening()
        loss, moving = loss_of(executor, case)
        jax.grad(loss)(moving)
        heard.append(asked)
    assert heard[0] == heard[1] != []


@each(first_of_each(OURS), first=())
def test_a_config_of_a_platform_alone_has_its_other_fields_chosen(case):
    """In both APIs, as with `platform=`."""
    modules, renamed = getattr(ejkernel.modules, case.operation), OPERATIONS[case.operation].renamed
    given = {renamed.get(n, n): x for n, x in {**case.arrays(), **case.options}.items()}
    calls = (
        lambda: modules(**given, platform="xla"),
        lambda: modules(**given, cfg={"platform": "xla"}),
        lambda: getattr(ejkernel.lax, case.operation)(**case.arrays(), **case.options, config={"platform": "xla"}),
    )
    programs = [[e.params["config"] for e in equations(jax.make_jaxpr(call)().jaxpr, case.operation)] for call in calls]
    assert programs[0] == programs[1] == programs[2] != []


@each([case for case in first_of_each(OURS) if "triton" in platforms_of(case.operation)], first=())
def test_a_platform_that_is_elsewhere(case):
    """`platform=` applies to the device that a program is lowered for, which may differ from the one that traces it.

    The gradient uses the same platform, where it has an implementation there.
    """
    pytest.importorskip("jax_triton")
    operation = OPERATIONS[case.operation]
    example = {operation.renamed.get(name, name): x for name, x in operation.example().items()}
    is_float = lambda x: isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating)
    moving = {name: x for name, x in example.items() if is_float(x)}
    rest = {name: x for name, x in example.items() if name not in moving}
    arrays = {name: x for name, x in rest.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in rest.items() if name not in arrays}

    def loss(moving, arrays):
        call = getattr(ejkernel.modules, case.operation)
        return sum(map(total, jax.tree.leaves(call(**moving, **arrays, **options, platform="triton"))))

    total = lambda x: jnp.sum(x.astype(jnp.float32))
    is_differentiable = operation.algorithm.differentiable
    traced = jax.jit(jax.grad(loss) if is_differentiable else loss).trace(moving, arrays)
    labels = [label_fields(label) for label in find_labels_in_lowered(traced.lower(lowering_platforms=("cuda",)))]
    assert case.operation + ("_bwd" if is_differentiable else "") in {label["op"] for label in labels}
    assert {label["impl"] for label in labels} == {"triton"}
    with pytest.raises(UnsupportedError, match="no implementation on cpu"):
        traced.lower(lowering_platforms=("cpu",))


def test_the_operations_of_a_call_are_chosen_by_its_executor(no_default):
    """The three branches of native_sparse_attention and its choice of blocks."""
    executor, asked = listening()
    (case,) = (case for case in CASES if str(case) == "native_sparse_attention-branches")
    loss, moving = loss_of(executor, case)
    jax.eval_shape(jax.grad(loss), moving)
    forwards = {"native_sparse_attention", "native_sparse_blocks", "flash_attention"}
    assert forwards | {"flash_attention_bwd", "native_sparse_attention_bwd"} <= set(asked)


def over_two_devices(recurrent):
    """The gradient of a recurrence over a sequence on two devices: they run it for states, results and tangents."""
    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    split = PartitionSpec(None, "x")
    of_shards = jax.shard_map(partial(recurrent, axis_name="x"), mesh=mesh, in_specs=split, out_specs=split)
    loss = lambda *x: of_shards(*x).astype(jnp.float32).sum()
    return equations(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, q, q), "recurrent")


def test_the_executor_and_the_platform_hold_for_the_states_of_other_devices(no_default):
    executor, asked = listening()
    found = over_two_devices(partial(executor, ejkernel.modules.Recurrent(), platform="xla"))
    assert {"recurrent", "recurrent_bwd"} <= set(asked)
    assert {e.params["chooser"].platform for e in found} == {"xla"}


@pytest.mark.parametrize("api", ["lax", "modules"])
@pytest.mark.parametrize(
    "config", [RecurrenceConfig(chunk_size=32, subchunk_size=8), KernelConfig(block_q=32, block_k=8)], ids=repr
)
def test_a_config_holds_for_the_states_of_other_devices(config, api):
    recurrent = partial(getattr(ejkernel, api).recurrent, **{{"lax": "config", "modules": "cfg"}[api]: config})
    forwards = [e.params["config"] for e in over_two_devices(recurrent) if e.primitive.name == "recurrent"]
    assert len(forwards) > 1
    assert {(config.chunk_size, config.subchunk_size) for config in forwards} == {(32, 8)}


def test_an_executor_without_a_cache_on_disk_writes_no_file(tmp_path, monkeypatch):
    """Nor for the backward, for which no other executor is asked."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    with pytest.warns(DeprecationWarning):
        executor = ejkernel.modules.create_default_executor(None, enable_autotuning=False)
    loss, moving = loss_of(executor, PLAIN["mean_pooling"])
    jax.grad(loss)(moving)
    assert not list(tmp_path.iterdir())


@each_operation
def test_implementations_are_asked_once_while_a_call_is_traced(case, monkeypatch):
    """Heuristics, the space of configs and the check of a config see the same answers; operands are packed once."""
    primitive, packed = case.algorithm.forward, []
    pack = primitive.operands
    monkeypatch.setattr(primitive, "operands", lambda named: packed.append(named) or pack(named))
    asked, reason = [], _dispatch._reason
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "autotune")
    monkeypatch.setattr(_dispatch, "_reason", lambda entry, *call: asked.append(entry) or reason(entry, *call))
    jax.eval_shape(case.call, case.arrays())
    assert 0 < len(asked) == len(set(asked)) and len(packed) == 1
