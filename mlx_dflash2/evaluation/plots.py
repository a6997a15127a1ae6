"""Draw what several commands plot."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL = "Plots need matplotlib: pip install 'mlx-dflash2[plots]'."


def new_figure() -> "Figure":
    """Make an empty figure.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(INSTALL) from error
    # Without pyplot: no window, no global state.
    return Figure(figsize=(7, 4.2), layout="constrained", dpi=130)


def line_plot(title: str, curves: dict[str, list[float]], ylabel: str) -> "Figure":
    """Plot shares by position in the block, a curve for each label."""
    figure = new_figure()
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    for label, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=label)
    axes.set(xlabel="position in the block", ylabel=ylabel, title=title, ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure to a file, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
