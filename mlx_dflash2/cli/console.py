"""Run a command in a terminal: an error, a warning or an interruption takes one line."""

import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from .progress import Progress


def run(command: Callable[[], None]) -> None:
    """Run a command's body, and exit without a traceback.

    A warning or an error takes one line on stderr. The exit status is 1 for an error, 130 for
    Ctrl-C, and 141 if the reader of stdout has closed it.
    """
    _open_closed_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _warn(message)
            command()
            sys.stdout.flush()
    except KeyboardInterrupt:
        note("")
        sys.exit(130)
    except BrokenPipeError:
        # Nothing can be written any more, so the interpreter's flush at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (MemoryError, RuntimeError) as error:
        if (problem := device_problem(error)) is None:
            raise
        sys.exit(f"error: {problem}")
    except (ImportError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, ImportError) and "libmlx" in text:
            text = f"MLX has no backend here ({text}); on Linux: pip install 'mlx[cpu]'"
        sys.exit(f"error: {text}")


def device_problem(error: Exception) -> str | None:
    """Say what to try after an error of the device; ``None`` for any other error.

    MLX raises ``RuntimeError`` for its own, and marks the backend in brackets.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or re.search(
        "insufficient memory|malloc|bad_alloc", text, re.I
    ):
        advice = "try a smaller --prefill-step-size, --max-kv-size, --kv-bits or a smaller model"
        return f"out of memory ({text or type(error).__name__}): {advice}"
    if re.search(r"^\[(metal|cuda)|command buffer|cuda", text, re.I):
        return f"the GPU failed ({text}): run the command again, or mlx_dflash2 doctor --kernels"
    return None


def _open_closed_streams() -> None:
    """Read nothing from, and write nothing to, streams that the caller has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def note(text: str) -> None:
    """Print a line on stderr, above a progress bar; stdout belongs to the generated text."""
    Progress.write(text, file=sys.stderr)
    sys.stderr.flush()


def _warn(message: Warning | str) -> None:
    note(f"warning: {' '.join(str(message).split())}")


@contextmanager
def streamed_answer() -> Generator[Callable[[str], None], None, None]:
    """Yield a function that prints a piece of an answer on stdout.

    A newline ends the answer, and warnings wait until then. Nothing is printed if it fails before
    its first piece.
    """
    started = False

    def show(text: str) -> None:
        nonlocal started
        started = True
        print(text, end="", flush=True)

    with warnings.catch_warnings(record=True) as caught:
        try:
            yield show
            started = True
        finally:
            if started:
                print(flush=True)
    for warning in caught:
        _warn(warning.message)


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
    with Progress(desc="Prompt", unit="token", delay=2, leave=False) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        yield update
