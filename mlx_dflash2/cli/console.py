"""How every command meets the terminal: one line for an error, a warning or an interruption."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


def run(command: Callable[[], None]):
    """Run a command's body so that whatever ends it ends it cleanly.

    Warnings and errors take one line on stderr. The exit status is 1 for an error, 130 for
    Ctrl-C, 141 for a reader that went away.
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
        # Nothing more can be written, not even what the interpreter would flush at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ImportError, OSError, ValueError) as error:
        sys.exit("error: " + " ".join(str(error).split()))


def note(text: str):
    """A line on stderr: stdout belongs to the generated text."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def stoppable() -> Generator[Callable[[], bool], None, None]:
    """Tells whether Ctrl-C was pressed, instead of an exception that can strike anywhere.

    Pressed again, for whoever does not want to wait, it raises ``KeyboardInterrupt``.
    """
    pressed = False

    def press(*_):
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
    """A callback that shows a bar on stderr if a prompt takes more than two seconds."""
    with tqdm(desc="Prompt", unit="token", delay=2, leave=False) as bar:

        def update(done: int, total: int):
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield update
