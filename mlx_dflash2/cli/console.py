"""Run a command in a terminal: an error, a warning or an interruption takes one line."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def run(command: Callable[[], None]) -> None:
    """Run a command's body, and exit without a traceback.

    A warning or an error takes one line on stderr. The exit status is 1 for an error, 130 for
    Ctrl-C, and 141 if the reader of stdout has closed it.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
            command()
            sys.stdout.flush()
    except KeyboardInterrupt:
        note("")
        sys.exit(130)
    except BrokenPipeError:
        # Nothing can be written any more, so the interpreter's flush at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ImportError, OSError, ValueError) as error:
        sys.exit("error: " + " ".join(str(error).split()))


def note(text: str) -> None:
    """Print a line on stderr; stdout belongs to the generated text."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def stoppable() -> Generator[Callable[[], bool], None, None]:
    """Yield a function that tells whether Ctrl-C was pressed, which raises nothing at first.

    A second Ctrl-C raises ``KeyboardInterrupt``.
    """
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def prefill_progress() -> Generator[Callable[[int, int], None], None, None]:
    """Yield a callback that shows a bar on stderr if a prompt takes more than two seconds."""
    with tqdm(desc="Prompt", unit="token", delay=2, leave=False) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield update
