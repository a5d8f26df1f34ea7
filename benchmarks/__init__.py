"""Times of this library and its rivals for the calls in `ejkernel/types/shapes`: `python -m benchmarks OPERATION`.

The file of an operation has the arrays of its calls, the formula that judges results, and the rivals. `_driver` first
checks the results of each contender, then times them, interleaved in one process, and writes a record to `results/`.

Other programs: `tuning` times every config of a kernel, `tpu_compile` and `tpu_estimates` read the programs that the
TPU compiler makes, `host_cost`, `xla_cpu`, `release_cpu`, `training` and `first_call` have bars to meet,
`profile_labels` and `profile_overlap` read a profile, `sequence_shards` compares several devices with one,
`attention_bias` compares bias and mask with cuDNN, `packed_attention` packed sequences with FlashAttention-3,
`differential_attention` is compared with two calls of flash_attention, and `fused_norm` compares a layer with the same
layer without norms. `report` writes the tables of the documents from `results/`.
"""

import os

# torch needs memory on the same GPU. What imports this package has not started JAX's backend yet.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
