"""The primitives: what an operation is for JAX, with its rules, and no code of a kernel."""
