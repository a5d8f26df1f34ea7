"""Quantisation of weights, keys and values."""
