"""A config that is not hashable is refused with its class and the rule, whoever chooses it."""

from dataclasses import dataclass

import pytest
from shown import Shown, executor, ones

from ejkernel.errors import EjkernelRuntimeError
from ejkernel.ops import autotune_recorded

SAYS = r"loose: config is a Loose, which is not hashable \(.*\); a config has to be a frozen dataclass"


@dataclass
class Loose:
    block: int = 1


class Unhashable(Shown):
    def heuristic_cfg(self, inv):
        return Loose()

    def config_space(self, inv):
        return [Loose(), Loose(2)]


CALLS = {
    "measured": lambda: executor(autotune=True)(Unhashable("loose"), ones()),
    "heuristic": lambda: executor(autotune=False)(Unhashable("loose"), ones()),
    "given": lambda: executor(autotune=False)(Shown("loose"), ones(), cfg=Loose()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_of_a_call(call):
    with pytest.raises(TypeError, match=SAYS):
        call()


def test_of_a_recorded_call():
    calls = {"call": (Unhashable("loose"), (ones(),), {})}
    with pytest.raises(EjkernelRuntimeError, match=SAYS):
        autotune_recorded({"loose": calls}, executor())
