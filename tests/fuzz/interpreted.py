"""Triton's kernels on a CPU by the ordinary way through JAX, which calls their interpreter for each launch.

Arrays stand between NaN, so that reading or writing beyond them shows, and operands may not be written.
"""

import random
import sys
import threading
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.lowering import _rule

from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._triton import _launch
from ejkernel.ops.utils import devices
from ejkernel.types import Platform, Target
from tests.kernels import interpreter

from .operations._draws import SIZES

SMALL = replace(
    SIZES["triton"],
    lengths=(1, 5, 16, 33, 63, 64, 77, 130),
    features=(16, 32, 64, 96),
    attention_features=(16, 32, 40, 64, 96),
    steps=(1, 3, 8, 20),
    paged_features=(8, 16, 32, 64),
    draws=3,
)
"""Sizes that the interpreter has time for."""
BEFORE = 1 << 16
"""Bytes before and after an array."""
ONE_AT_A_TIME = threading.Lock()  # the interpreter changes the modules of kernels while it runs


def on(target: Target, monkeypatch) -> None:
    """Programs for this device are lowered as for that target, with configs at random, and kernels are interpreted."""
    for name in ("local_target", "device_target", "target_of"):
        plain = getattr(devices, name)
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is plain:
                monkeypatch.setattr(module, name, lambda *_: target)
    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "refusal", lambda target: None)
    for what in ("has_ptx", "has_descriptors"):
        monkeypatch.setattr(_launch, what, lambda: False)
    monkeypatch.setattr(_rule, "_is_stored", lambda *_: False)
    for operation in kernel_registry.list_algorithms():
        for entry in kernel_registry.list_implementations(operation):
            if entry.platform == Platform.TRITON:
                monkeypatch.setattr(entry.implementation, "heuristic", _at_random(entry.implementation))


def _at_random(implementation):
    """A config of the space in the place of the likeliest one, the same for the same call."""
    heuristic = implementation.heuristic

    def choose(spec, operands, target):
        call = repr((spec, jax.tree.map(lambda x: (x.shape, str(x.dtype)), operands)))
        draw = random.Random(zlib.crc32(call.encode()))
        return (
            heuristic(spec, operands, target)
            if draw.random() < 0.3
            else draw.choice(implementation.space(spec, operands, target))
        )

    return choose


def launch(kernel, *operands, out_type, grid, config, input_output_aliases=None, zeroed_outputs=(), **constants):
    """`ejkernel.kernels._triton._launch.launch`, in a program for a CPU."""
    leaves, tree = jax.tree.flatten(out_type)

    def run(*given):
        fenced, arrays = [], iter(given)

        def place(x):
            fenced.append(Fenced(np.asarray(x)))
            return fenced[-1].array

        those = [None if x is None else place(next(arrays)) for x in operands]
        present = [x for x in those if x is not None]
        arguments, outputs = interpreter.placed(
            kernel, those, leaves, input_output_aliases, zeroed_outputs, constants, place
        )
        with ONE_AT_A_TIME, np.errstate(all="ignore"):
            interpreter.run(kernel, arguments, grid)
        for n, one in enumerate(fenced):
            written = n < len(present) and not any(present[n] is x for x in outputs) and one.is_written
            assert not written, f"{kernel.__name__} writes its operand {n}"
            assert not one.is_left, f"{kernel.__name__} writes beyond array {n}"
        return [np.array(x) for x in outputs]

    types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    return tree.unflatten(jax.pure_callback(run, types, *(x for x in operands if x is not None)))


class Fenced:
    """A copy of an array between NaN, or zeros if it is of integers."""

    def __init__(self, x: np.ndarray):
        self.all = np.zeros(x.nbytes + 2 * BEFORE + 64, np.uint8)
        if jnp.issubdtype(x.dtype, jnp.floating):
            self.all[:] = 0x7F if x.dtype == jnp.float8_e4m3fn else 0xFF
        self.first = BEFORE + -(self.all.ctypes.data + BEFORE) % 64
        self.last = self.first + x.nbytes
        self.array = self.all[self.first : self.last].view(x.dtype).reshape(x.shape)
        self.array[...] = x
        self.before = self.all.copy()

    @property
    def is_written(self) -> bool:
        """Whether an element has changed."""
        inside = slice(self.first, self.last)
        return not np.array_equal(self.all[inside], self.before[inside])

    @property
    def is_left(self) -> bool:
        """Whether something has changed outside."""
        around = (slice(self.first), slice(self.last, None))
        return not all(np.array_equal(self.all[part], self.before[part]) for part in around)
