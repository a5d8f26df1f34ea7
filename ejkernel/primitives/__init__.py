"""The primitives of JAX for each operation, with their rules, and without any code of kernels."""
