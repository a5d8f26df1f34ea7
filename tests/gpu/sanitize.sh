#!/usr/bin/env bash
# Forward, backward and tangent under compute-sanitizer: reads and writes out of bounds, and of memory never written.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform JAX_PLATFORMS=cuda,cpu
for tool in memcheck racecheck; do
  "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all \
    python3 -m pytest -q -p no:cacheprovider tests/gpu/test_flash_attention.py -k "${1:-causal and bfloat16 and not bias}"
done
