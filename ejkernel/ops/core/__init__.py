"""Kernels, their calls, and the tuner of their configs."""
