"""Make the fast BLAS in this Python environment: a step of an installation."""

import sys

from .library import install


def main() -> None:
    """Make the library, or say in one line why not; MLX works without it."""
    if sys.platform != "linux":
        return
    try:
        print(f"fast BLAS: {install()}")
    except OSError as error:
        print(f"fast BLAS: not made, {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
