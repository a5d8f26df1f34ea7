"""Shared by the tests of `ejkernel doctor`: devices, and what the kernels need."""

import importlib.util

import pytest

from ejkernel.__main__ import main
from ejkernel.types import Target

needs_jax_triton = pytest.mark.skipif(not importlib.util.find_spec("jax_triton"), reason="jax-triton is not installed")
H200, A100 = Target("cuda", "NVIDIA H200"), Target("cuda", "NVIDIA A100-SXM4-80GB")


def told(capsys):
    """The exit status, the rows of the calls by operation and implementation, and the last lines."""
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("operation "))
    end = lines.index("", start)
    return status, {tuple(line.split()[:2]): line for line in lines[start + 1 : end]}, lines[end + 1 :]
