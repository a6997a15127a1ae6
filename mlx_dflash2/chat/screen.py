"""The terminal of a chat: framed like mlx_lm.chat's, and plain lines in a pipe."""

import sys
from contextlib import suppress

from mlx_lm.cli_ui import corridor_input, make_console, print_header_panel
from rich.markup import escape

from ..cli.console import note

with suppress(ImportError):
    # Gives `input` line editing and a history.
    import readline  # noqa: F401


class Screen:
    """Shows what surrounds the answers, and reads messages."""

    def __init__(self) -> None:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = make_console() if is_terminal else None

    def header(self, title: str, rows: dict[str, str]) -> None:
        """Show facts by name, in a frame on a terminal."""
        if self._console is None:
            note(", ".join(f"{name} {text}" for name, text in rows.items()))
        else:
            escaped = [(name, escape(text)) for name, text in rows.items()]
            print_header_panel(self._console, title, escaped)

    def ask(self) -> str | None:
        """Read the user's next line; ``None`` at the end of input or for Ctrl-C."""
        try:
            return input() if self._console is None else corridor_input(self._console)
        except (EOFError, KeyboardInterrupt):
            note("")
            return None
