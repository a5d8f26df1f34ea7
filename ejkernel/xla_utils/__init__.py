"""Functions in plain JAX that several operations share."""
