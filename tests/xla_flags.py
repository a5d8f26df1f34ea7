"""XLA's flags of tests and pages: eight CPU devices, and small programs that compile in half the time."""

DEVICES = "--xla_force_host_platform_device_count=8"
COMPILES_FAST = (
    "--xla_backend_optimization_level=0",  # LLVM's, not HLO's
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # LLVM in one piece
    # The emitters before those of MLIR, which make a context and rewrite in several passes for every fusion: small
    # programs compile in 40% of the time. jax 0.12 has them no more, and runs the core with those of MLIR.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
