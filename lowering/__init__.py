"""The MLIR lowerings of every kernel primitive, per platform.

Importing this registers them, for the primitives that are defined and for those to come.
"""

from ejkernel.primitives._factory import on_definition

from . import cpu, cuda, rocm, tpu
from ._rule import register_derivative

for _register in (cpu.register, cuda.register, rocm.register, tpu.register, register_derivative):
    on_definition(_register)
