"""What runs a kernel: executor, batches of recorded calls, tuning in a process group."""
