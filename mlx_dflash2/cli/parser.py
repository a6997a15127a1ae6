"""The argument parser of every command."""

import argparse
from typing import Any, NoReturn

from .._version import __version__
from .versions import tell_versions


class Parser(argparse.ArgumentParser):
    """A parser that knows ``--version`` and reports a wrong use in two lines.

    Args:
        prog (str): The command's name.
        description (str): What it does.
    """

    def __init__(self, prog: str, description: str | None = None, **kwargs: Any) -> None:
        kwargs = {"usage": "%(prog)s [options]"} | kwargs
        super().__init__(prog=prog, description=description, **kwargs)
        self.add_argument("--version", action=_Version)

    def error(self, message: str) -> NoReturn:
        """Print how to get help and what is wrong, and exit with 2."""
        self.exit(2, f"usage: {self.prog} [options], see {self.prog} --help\nerror: {message}\n")


class _Version(argparse.Action):
    """Prints the version, and exits."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        text = "show the version number and exit"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(__version__)
        tell_versions()
        parser.exit()


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
