"""Inline assembly, and all that the kernels touch of Mosaic GPU beside its public names.

A function stands here where Pallas has no operation for what it does; its docstring says what for. Registers of a
tile are private to `FragmentedArray`, and so is how one is made of new ones (`registers.fragment`): inline assembly
takes and gives single registers. `_internals.moved` looks whether the installed JAX has what is used here.

Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""
