"""quantized_matmul in Triton: masks, indices and numbers of its kernel, by the interpreter."""

import pytest
from cases import Operand
from cases.quantized_matmul import case, codes, middle, positive

from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.quantized_matmul import kernels  # noqa: E402

from . import against_xla, interpreter  # noqa: E402


def call(bits, group, transpose, rows, features, columns):
    """A call of few rows."""
    of_codes, codes_of_row = (columns, features) if transpose else (features, columns)
    sizes = dict(b=2, s=rows, k=features, r=of_codes, p=codes_of_row * bits // 32, u=codes_of_row // group)
    operands = {
        n: Operand(f"r {axis}", of)
        for n, axis, of in (("w", "p", codes), ("scales", "u", positive), ("zeros", "u", middle))
    }
    return case(
        f"{bits}-{group}-{transpose}", sizes, operands, "b s c", bits=bits, group_size=group, transpose=transpose
    )


# Tiles beyond the rows, the codes of a row and the rows of codes; groups that are wider than a tile, and many in one;
# more rows than a config has; codes of a row in one word.
CALLS = [
    call(bits, group, transpose, rows, *sizes)
    for bits, group, transpose, rows, sizes in (
        (4, 16, False, 3, (40, 48)),
        (4, 64, False, 1, (50, 192)),
        (8, 16, False, 8, (17, 32)),
        (2, 32, False, 5, (33, 96)),
        (4, 16, True, 3, (48, 40)),
        (4, 64, True, 1, (192, 50)),
        (8, 32, True, 8, (96, 33)),
        (2, 16, True, 5, (32, 17)),
        (2, 16, False, 16, (16, 16)),
        (4, 32, True, 20, (32, 17)),
    )
]


@pytest.mark.parametrize("parts", (1, 2), ids=("whole", "parts"))
@pytest.mark.parametrize("of", CALLS, ids=lambda of: of.name)
def test_in_the_interpreter(of, parts, monkeypatch):
    """Forward, backward and tangent; the features whole, and in parts that are added up."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(kernels, "_takes_ptx", lambda: False)
    monkeypatch.setattr(kernels, "_parts", lambda tiles, steps: min(parts, steps))
    config = QuantizedMatmulConfig(16, 32, 16)
    against_xla.check(of, against_xla.prepared(of), "triton", "gpu", config)
