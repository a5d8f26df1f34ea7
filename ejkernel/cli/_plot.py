"""The two loss curves as a picture."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ._curves import SPAN, Tolerance, difference, running_mean

INK, MARK, QUIET, _BOUND = "#222222", "#0a6e5c", "#b5b5b5", "#b3392f"


def plot(losses: Mapping[str, np.ndarray], tolerance: Tolerance, title: str, file: Path) -> None:
    """Both curves, faint for single steps and solid for running means; below them, the difference that is compared.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    (name, ours), (other, theirs) = losses.items()
    steps = np.arange(1, len(ours) + 1)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}):
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="tight")
        top.plot(steps, ours, color=MARK, linewidth=0.5, alpha=0.35)
        top.plot(steps, running_mean(theirs), color=QUIET, linewidth=4, label=other)
        top.plot(steps, running_mean(ours), color=MARK, linewidth=1.2, label=name)
        top.set(title=title, ylabel="loss, nats per character")
        top.legend(frameon=False)
        bottom.semilogy(steps, np.maximum(difference(ours, theirs, tolerance.single), 1e-8), color=INK, linewidth=0.7)
        bound = np.where(steps <= tolerance.single, tolerance.of_steps, tolerance.of_means)
        bottom.semilogy(steps, bound, color=_BOUND, linewidth=0.8, linestyle="--", label="tolerance")
        bottom.set_title(
            f"of each of the first {tolerance.single} steps, then of the means over {SPAN}", fontsize="medium"
        )
        bottom.set(ylabel="difference", xlabel="step", xlim=(1, max(len(ours), 2)))
        bottom.legend(frameon=False, loc="lower right")
        figure.savefig(file, dpi=150)
        plt.close(figure)
