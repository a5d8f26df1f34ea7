"""Kernels, their calls, and how configs are tuned."""
