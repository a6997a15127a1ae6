"""Pictures that several commands draw."""

INSTALL = "Plots need matplotlib: pip install 'mlx-dflash2[plots]'."


def new_figure():
    """An empty figure.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(INSTALL) from error
    # A figure of its own, without pyplot: no window, no global state.
    return Figure(figsize=(7, 4.2), layout="constrained", dpi=130)


def line_plot(title: str, curves: dict[str, list], ylabel: str):
    """Shares by position in the block, a curve for each label."""
    figure = new_figure()
    axes = figure.subplots()
    for label, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=label)
    axes.set(xlabel="position in the block", ylabel=ylabel, title=title, ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
