"""No kernel in Mosaic GPU spills more than 512 bytes, and no product of one waits for another.

NVIDIA's assembler reports both, without a GPU, with the heuristic configs.
"""

import pytest

from ejkernel.types.shapes import shapes_of

from . import mosaic_compiler

LIMIT = 512
# Of attention: a window with a softcap and many features, values of other features, and features between.
OFTEN = {
    "flash_attention": ("gemma2-9b-local", "deepseek-v3", "phi2"),
    "flash_mla": (),
    "blocksparse_attention": ("16k-25%",),
    "grouped_matmul": ("mixtral-8x7b-up",),
    "multi_latent_page_attention": ("b128-4k-h128", "top2k-4k-of-32k-h128"),
    "native_sparse_attention": ("16k",),
    "ragged_page_attention": ("b8-4k-512",),
}


def named():
    for operation, often in OFTEN.items():
        for shape in shapes_of(operation):
            yield pytest.param(operation, shape, "", marks=() if shape in often else pytest.mark.slow)
    for shape in ("b8-4k-512", "b8-4k-512-d64", "b8-4k-512-d256", "b64-1k-64"):
        marks = () if shape in OFTEN["ragged_page_attention"] else pytest.mark.slow
        yield pytest.param("ragged_page_attention", shape, "int8", marks=marks)
    for shape in ("b128-4k-h16", "b128-4k-h128", "top2k-4k-of-32k-h128"):
        for pages in ("int8", "e4m3"):
            marks = pytest.mark.slow if (shape, pages) != ("b128-4k-h128", "e4m3") else ()
            yield pytest.param("multi_latent_page_attention", shape, pages, marks=marks)


@pytest.mark.parametrize("operation, shape, pages", list(named()))
def test_kernels_have_the_registers_they_need(operation, shape, pages, tmp_path):
    if reason := mosaic_compiler.missing():
        pytest.skip(reason)
    reports = mosaic_compiler.reports(tmp_path, operation, shape, *filter(None, [pages]))
    assert all(reports.values()) and (reports or shape not in OFTEN[operation])
    spilled = {name: [spilled for spilled, _ in report] for name, report in reports.items()}
    assert all(n <= LIMIT for report in spilled.values() for n in report), spilled
    serialized = {name: remarks for name, report in reports.items() for _, remarks in report if remarks}
    assert not serialized, "wgmma is serialized where the registers of its pipeline do not suffice"
