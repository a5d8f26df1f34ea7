"""Deep-learning kernels for JAX that behave like native `jax.lax` operations."""
