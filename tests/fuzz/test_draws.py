"""Most random calls for the kernels of a GPU are ones that they take, by the kernels of an H100 without a GPU."""

import jax
import pytest

pytest.importorskip("jax_triton")

from jax.extend.core import Jaxpr

from ejkernel import UnsupportedError
from ejkernel._explain import _equations
from ejkernel.kernels._dispatch import candidates
from ejkernel.ops.core.kernel import KERNELS
from ejkernel.types import Target

from .calls import Call
from .checks import strict
from .failures_of_kernels import FAILURES_OF_KERNELS
from .operations._draws import SIZES
from .search import Search, TimeIsUp
from .test_random_calls import on_gpu
from .transforms import arguments, program

KIND = "NVIDIA H100 80GB HBM3"
PROGRAMS = 12


class Question(Search):
    """A search that asks whether calls are taken, and runs none."""

    def _example(self, drawn: list[Call]) -> None:
        if self.programs == PROGRAMS:
            raise TimeIsUp
        self.programs += 1
        taken = is_taken(drawn[0].program)
        self.ran, self.refused = self.ran + taken, self.refused + (not taken)


@pytest.mark.parametrize(("operation", "platform"), sorted({found[:2] for found in on_gpu()}))
def test_random_calls_run_on_kernels_of_a_gpu(operation, platform, types_unchecked):
    question = Question(operation, seconds=0, seed=0, sizes=SIZES[platform])
    question.run()
    assert 3 * question.ran >= question.programs, question


@pytest.mark.parametrize("call", [pytest.param(c, id=f"{c.operation}-{n}") for n, c in enumerate(FAILURES_OF_KERNELS)])
def test_what_once_failed_runs_on_a_kernel(call, types_unchecked):
    assert is_taken(call)


def is_taken(call: Call) -> bool:
    """Whether all primitives of a program have an implementation on the platform of the call."""
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with strict(), jax.sharding.use_abstract_mesh(mesh):
        try:
            traced = jax.make_jaxpr(program(call))(*arguments(call))
        except UnsupportedError:  # by the choice of a config
            return False
    return all(any(reason is None for _, reason in found) for found in asked(traced.jaxpr))


def asked(jaxpr: Jaxpr):
    """The candidates for each call of a primitive, whose arrays may have the axes of maps."""
    for equation in _equations(jaxpr):
        params, name = equation.params, equation.primitive.name
        if "chooser" in params and name in KERNELS:
            types = {operand: x.aval for operand, x in zip(params["operands"], equation.invars, strict=True)}
            operands = KERNELS[name].primitive.operands(types)
            yield candidates(name, params["spec"], operands, Target("cuda", KIND), params["chooser"].platform)
