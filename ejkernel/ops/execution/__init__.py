"""Running kernels: the executor, calls over many examples or devices, and tuning of recorded calls."""
