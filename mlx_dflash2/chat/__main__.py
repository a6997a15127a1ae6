"""Run the command."""

from functools import partial

from ..cli.start import start

main = partial(start, __package__)

if __name__ == "__main__":
    main()
