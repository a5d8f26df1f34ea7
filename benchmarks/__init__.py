"""What this library and its rivals take for the calls in `ejkernel/types/shapes`: `python -m benchmarks OPERATION`.

A file of an operation brings the arrays of its calls, the formula that judges results, and the rivals. `_driver` runs
it: first the numbers of each contender, then times, interleaved in one process, and a record in `results/`.

Beside those: `tuning` times every config of a kernel, `tpu_compile` and `tpu_estimates` read the programs that the
compiler of TPUs makes, `host_cost`, `xla_cpu`, `release_cpu`, `training` and `first_call` have bars to meet,
`profile_labels` and `profile_overlap` read a profile, `sequence_shards` compares devices, `attention_bias` a bias and a
mask with cuDNN, `differential_attention` one call with two, and `fused_norm` a layer with the same without its norms.
`report` writes the tables of the documents from `results/`.
"""

import os

# torch needs memory on the same GPU. What imports this package has not started JAX's backend yet.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
