"""No kernel of flash_attention in Mosaic GPU spills more than 512 bytes, and no product of one waits for another.

NVIDIA's assembler reports both, without a GPU, with the heuristic configs.
"""

import pytest

from . import mosaic_compiler

LIMIT = 512
KERNELS = ("flash_attention", "flash_attention_jvp", "flash_attention_bwd", "flash_attention_bwd deterministic")
# One of each kind: windows, softcaps, heads of many features, values of other features, and features between.
OFTEN = ("llama3-8b", "gemma2-9b-local", "gemma3-12b-local", "gemma2-27b-local", "deepseek-v3", "phi2", "h32-d160")
RARELY = (
    *("mistral-7b", "gemma2-9b", "gemma3-27b-local", "qwen3-next-80b", "vit-huge-full", "phi3-mini", "h32-d96-v64"),
    *("h32-d112", "h32-d192", "h16-d64", "h16-d64-full", "h16-d128-full", "h16-d256", "h16-d256-full"),
)


@pytest.mark.parametrize("shape", [*OFTEN, *(pytest.param(shape, marks=pytest.mark.slow) for shape in RARELY)])
def test_hopper_kernels_have_the_registers_they_need(shape, tmp_path):
    if reason := mosaic_compiler.missing():
        pytest.skip(reason)
    reports = mosaic_compiler.reports(tmp_path, shape, *KERNELS)
    assert reports.keys() == set(KERNELS) and all(reports.values())
    spilled = {name: [spilled for spilled, _ in report] for name, report in reports.items()}
    assert all(n <= LIMIT for report in spilled.values() for n in report), spilled
    serialized = {name: remarks for name, report in reports.items() for _, remarks in report if remarks}
    assert not serialized, "wgmma is serialized where the registers of its pipeline do not suffice"
