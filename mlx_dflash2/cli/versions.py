"""Whether the installed MLX and mlx-lm are ones that this package is tested with."""

import sys
from importlib import metadata

from .._version import __version__

PACKAGE = "mlx-dflash2"
_TESTED = ("mlx", "mlx-lm")


def version_problem() -> str | None:
    """Name what is installed and what is tested, in one line; ``None`` where they agree."""
    # It takes longer to import than an option takes to parse.
    from packaging.requirements import Requirement

    try:
        needed = map(Requirement, metadata.requires(PACKAGE) or ())
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed, so the tested versions are unknown"
    found = {r.name: r.specifier for r in needed if r.marker is None}
    tested = {name: found[name] for name in _TESTED}
    installed = {name: _installed(name) for name in tested}
    if all(v is not None and tested[name].contains(v, True) for name, v in installed.items()):
        return None
    here = " and ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    wanted = " and ".join(f"{name} {specifier}" for name, specifier in tested.items())
    return f"{here}: {PACKAGE} {__version__} is tested with {wanted}"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tell_versions() -> None:
    """Warn of an MLX or mlx-lm that this package is not tested with."""
    if (problem := version_problem()) is not None:
        print(f"warning: {problem}", file=sys.stderr, flush=True)
