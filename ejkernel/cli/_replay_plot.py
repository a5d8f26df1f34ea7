"""A plot of a replay: sequences and pages in use at each step, and the distribution of latencies."""

from pathlib import Path

import numpy as np

from ._plot import INK, MARK, QUIET
from ._replay import Replay


def plot_replay(found: Replay, pages: int, sequences: int, title: str, file: Path) -> None:
    """Sequences and pages over the steps, and the cumulative distributions of the times to a first and a next token.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = np.arange(1, len(found.steps) + 1)
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), layout="tight")
        (batch, first), (pool, between) = axes
        for axis, name, most in ((batch, "sequences", sequences), (pool, "pages", pages)):
            axis.fill_between(steps, [getattr(step, name) for step in found.steps], color=MARK, alpha=0.5, linewidth=0)
            axis.axhline(most, color=QUIET, linewidth=1, linestyle="--")
            axis.set(xlabel="step", ylabel=f"{name} in use" if name == "pages" else f"{name} in a step", ylim=(0, None))
        for axis, seconds, name in (
            (first, found.first, "to the first token"),
            (between, found.between, "between tokens"),
        ):
            milliseconds = 1e3 * np.sort(seconds)
            axis.plot(milliseconds, np.arange(1, len(seconds) + 1) / max(len(seconds), 1), color=MARK)
            axis.set(xlabel=f"ms {name}", ylabel="share", ylim=(0, 1.02))
        figure.suptitle(title, fontsize="medium")
        figure.savefig(file, dpi=150)
        plt.close(figure)
