"""XLA's flags of tests and pages: eight CPU devices, and small programs that compile in half the time."""

DEVICES = "--xla_force_host_platform_device_count=8"
COMPILES_FAST = (
    "--xla_backend_optimization_level=0",  # LLVM's, not HLO's
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # LLVM in one piece
)
