"""Pieces in plain JAX that several operations use."""
