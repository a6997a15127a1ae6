"""The argument parser of every command."""

import argparse
from typing import Any, NoReturn

from .._version import __version__


class Parser(argparse.ArgumentParser):
    """A parser that knows ``--version`` and reports a wrong use in two lines.

    Args:
        prog (str): The command's name.
        description (str): What it does.
    """

    def __init__(self, prog: str, description: str | None = None, **kwargs: Any) -> None:
        kwargs = {"usage": "%(prog)s [options]"} | kwargs
        super().__init__(prog=prog, description=description, **kwargs)
        self.add_argument("--version", action="version", version=__version__)

    def error(self, message: str) -> NoReturn:
        """Print how to get help and what is wrong, and exit with 2."""
        self.exit(2, f"usage: {self.prog} [options], see {self.prog} --help\nerror: {message}\n")


class UnsupportedAction(argparse.Action):
    """Rejects a flag of mlx-lm that has no meaning here, with the reason."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not supported: {self.help}")
