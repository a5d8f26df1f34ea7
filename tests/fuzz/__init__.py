"""A random search of the public operations: options × transforms × dtypes × values, against float64.

`operations/<operation>.py` generates calls and `formulas/<operation>.py` has their formula; a new operation needs only
these two files. `failures.py` has calls that once failed, and `failures_of_kernels.py` those that failed with a kernel
of a GPU.

    python -m pytest tests/fuzz                                   the search of CI, the same calls each time
    python -m pytest tests/fuzz -m slow -n auto                   other calls each time, for an hour on two cores
    JAX_PLATFORMS=cuda,cpu OPENBLAS_NUM_THREADS=1 python -m pytest tests/fuzz -m gpu -n 28     on a GPU

FUZZ_SECONDS (of each part), FUZZ_SEED and FUZZ_PARTS override their values, and FUZZ_LOG names a file for all failures;
without it the first failure is shrunk and shown.
"""
