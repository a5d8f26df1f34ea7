"""Codebooks for the coordinates of random directions: the scalar quantiser of Lloyd and Max, arXiv 2504.19874.

A coordinate x of a unit vector of d numbers that is rotated at random has the density

    f(x) = C · (1 − x²)^((d−3)/2),   C = Γ(d/2) / (√π · Γ((d−1)/2)),   −1 ≤ x ≤ 1

A codebook c_1 < … < c_n with boundaries b_i = (c_i + c_{i+1}) / 2 has the least mean squared error where each entry is
the mean of its cell: c_i · m_i = μ_i, of the mass m_i = ∫ f and the first moment μ_i = ∫ x·f between its boundaries.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from .._static import int_within


@dataclass(frozen=True, eq=False)
class LloydMaxCodebook:
    """A codebook of 2^bits entries for unit vectors of `dim` numbers.

    Attributes:
        bits: of an index.
        dim: features of the vectors.
        centroids: the entries [2^bits] in float32, ascending.
        boundaries: [2^bits − 1] in float32, the middle between two entries.
        distortion: E‖x − c‖² of a unit vector x of which every coordinate is quantised.
    """

    bits: int
    dim: int
    centroids: np.ndarray
    boundaries: np.ndarray
    distortion: float

    @property
    def n_levels(self) -> int:
        """The number of entries."""
        return len(self.centroids)


def solve_lloyd_max(bits: int, dim: int) -> LloydMaxCodebook:
    """The codebook with the least mean squared error, for coordinates of random unit vectors.

    Args:
        bits: of an index, from 1 to 8.
        dim: features of the vectors, at least 2.

    Returns:
        The codebook, symmetric around 0. Its arrays cannot be written.

    Raises:
        TypeError, ValueError: bits or dim are no ints, or out of range.

    Lloyd, Least squares quantization in PCM, 1982; Max, Quantizing for minimum distortion, 1960.
    """
    name = "solve_lloyd_max"
    return _solution(int_within(name, "bits", bits, 1, 8), int_within(name, "dim", dim, 2))


@functools.cache
def _solution(bits: int, dim: int) -> LloydMaxCodebook:
    c = _solved(_at_first(2**bits, dim), dim)
    mass, _ = _cells(c, dim)
    found = c.astype(np.float32), ((c[1:] + c[:-1]) / 2).astype(np.float32)
    for x in found:
        x.flags.writeable = False
    return LloydMaxCodebook(bits, dim, *found, distortion=float(1 - dim * (mass * c * c).sum()))


def _at_first(count: int, dim: int) -> np.ndarray:
    """Entries as dense as ∛f is, which the best ones are where there are many (Panter and Dite, 1951)."""
    x = np.sin(np.linspace(-1, 1, 20001) * min(np.pi / 2, 12 / np.sqrt(dim)))
    x = x[1:-1]
    density = _density(x, dim) ** (1 / 3)
    total = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x)))
    return np.interp((np.arange(count) + 0.5) / count, total / total[-1], x)


def _solved(c: np.ndarray, dim: int) -> np.ndarray:
    """Newton's method on F_i = c_i·m_i − μ_i, from entries that are near.

    ∂F_i/∂b = ±f(b)·(c_i − b) at the upper and lower boundary of a cell, and each is in the middle of two entries.
    Where it does not bring the entries nearer to the means of their cells, these means are the next ones, as Lloyd has
    it.
    """
    for _ in range(1000):
        (mass, moment), b = _cells(c, dim), (c[1:] + c[:-1]) / 2
        upper = np.append(_density(b, dim) * (c[:-1] - b) / 2, 0)
        lower = np.append(0, _density(b, dim) * (c[1:] - b) / 2)
        slope = np.diag(mass + upper - lower) + np.diag(upper[:-1], 1) - np.diag(lower[1:], -1)
        new = c - np.linalg.solve(slope, c * mass - moment)
        new, error = (new - new[::-1]) / 2, _error(c, dim)
        c = new if _error(new, dim) < error else moment / mass
        if error < 1e-8:
            break
    return c


def _error(c: np.ndarray, dim: int) -> float:
    """How far an entry is from the mean of its cell, by the standard deviation; ∞ of entries that are not in order."""
    if (np.diff(c) <= 0).any() or np.abs(c).max() >= 1:
        return math.inf
    mass, moment = _cells(c, dim)
    return float(np.abs(c - moment / mass).max() * math.sqrt(dim))


def _cells(c: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Mass and first moment of every cell.

    With x = sin φ the mass is C·∫ cos^(d−2) φ dφ, by 32 points of Gauss and Legendre in the cells between two
    boundaries; the outer two have half of what is left of 1. The moment has a primitive, −C/(d−1) · (1 − x²)^((d−1)/2).
    """
    b = (c[1:] + c[:-1]) / 2
    points, weights = np.polynomial.legendre.leggauss(32)
    phi = np.arcsin(b)
    half, middle = np.diff(phi) / 2, (phi[1:] + phi[:-1]) / 2
    log_cos = np.log(np.cos(middle[:, None] + half[:, None] * points))
    inner = half * (np.exp(_log_factor(dim) + (dim - 2) * log_cos) * weights).sum(1)
    ends = np.exp(_log_factor(dim) + (dim - 1) / 2 * np.log1p(-b * b)) / (dim - 1)
    ends = np.concatenate([[0], ends, [0]])
    outer = (1 - inner.sum()) / 2  # the entries are symmetric, and so are the cells
    return np.concatenate([[outer], inner, [outer]]), ends[:-1] - ends[1:]


def _density(x: np.ndarray, dim: int) -> np.ndarray:
    return np.exp(_log_factor(dim) + (dim - 3) / 2 * np.log1p(-x * x))


def _log_factor(dim: int) -> float:
    return math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - math.log(math.pi) / 2
