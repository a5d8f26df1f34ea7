"""Inline assembly, and every use that the kernels make of private parts of Mosaic GPU.

Each function does something for which Pallas has no operation; its docstring says why it is needed. Inline assembly
takes and returns single registers, but the registers of a `FragmentedArray`, and the way to build one from new ones
(`registers.fragment`), are private. `_internals.moved` checks that the installed JAX has all that is used here.

Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""
