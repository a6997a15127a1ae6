"""Run the command."""

import sys


def main() -> None:
    """Run the command on the process's arguments."""
    try:
        # Imported here so that Ctrl-C is answered in one line from now on.
        from ..cli.start import start

        start(__package__)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
