"""A kernel with four candidates to be measured within a budget, a fake clock, and hooks on lowering and compiling."""

import concurrent.futures
from types import SimpleNamespace

from shown import HEURISTIC, Config, Shown, ones

from ejkernel.ops import Invocation, Tuner
from ejkernel.ops.core import programs

SPACE = [HEURISTIC, *map(Config, (2, 3, 4))]
quick = Tuner(warmup=1, iters=1)


class Several(Shown):
    """Four candidates."""

    def __init__(self):
        super().__init__("several")

    def config_space(self, inv):
        return SPACE


class Clock:
    """A clock that advances only when a test or a blocked wait advances it.

    Attributes:
        blocked: how many of the futures block, for the first wait, the second, and so on.
    """

    def __init__(self):
        self.now, self.blocked = 0.0, []

    def __call__(self):
        return self.now

    def wait(self, futures, timeout=None, return_when="ALL_COMPLETED"):
        """As `concurrent.futures.wait`; blocked futures take the whole timeout, all others no time."""
        futures, blocked = set(futures), self.blocked.pop(0) if self.blocked else 0
        wanted = len(futures) - blocked
        if return_when == "FIRST_COMPLETED" and not blocked:
            wanted = min(1, len(futures))
        while len(concurrent.futures.wait(futures, 0).done) < wanted:
            pending = concurrent.futures.wait(futures, 0).not_done
            assert not pending or concurrent.futures.wait(pending, 60, "FIRST_COMPLETED").done
        self.now += timeout if blocked else 0
        return concurrent.futures.wait(futures, 0)


class Steps:
    """Hooks called while programs are made: `lowering` and `compiling` are called with each config."""

    def __init__(self):
        self.done, self.lowering, self.compiling = [], lambda config: None, lambda config: None

    def lowered(self, kernel, inv, config):
        self.lowering(config)
        program = programs.lowered(kernel, inv, config)
        self.done.append(("lowered", config))

        def compile():
            self.compiling(config)
            compiled = program.compile()
            self.done.append(("compiled", config))
            return compiled

        return SimpleNamespace(compile=compile)

    def of(self, step):
        return [config for name, config in self.done if name == step]


def measured(kernel, seconds):
    return quick.measure(kernel, Invocation(kernel, (ones(),), {}), budget=seconds)
