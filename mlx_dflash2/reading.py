"""One line for whatever a library raises about the content of a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The most characters of a library's own message that an error repeats.
_MESSAGE = 300


@contextmanager
def reading(what: str | Path, problem: str = "cannot be read") -> Iterator[None]:
    """Turn whatever a library raises about the content of a file into one line that names it.

    Raises:
        ValueError: for any error but a missing file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    # Content of any kind meets mlx-lm, transformers and tokenizers, and the last raises
    # `Exception` itself.
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        message = kind + " ".join(str(error).split())
        message = message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]}…"
        raise ValueError(f"{what} {problem}: {message}") from error
