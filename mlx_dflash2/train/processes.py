"""What several processes that train one drafter have to decide together."""

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..cli import console


def note(text: str) -> None:
    """Print a line on stderr, in one of the processes."""
    if mx.distributed.init().rank() == 0:
        console.note(text)


def any_of(flag: bool, group: mx.distributed.Group) -> bool:
    """Tell whether a flag is set in any of the processes."""
    if group.size() == 1:
        return flag
    total = mx.distributed.all_sum(mx.array(int(flag)), group=group, stream=mx.cpu)
    return bool((total > 0).item())


def wait(group: mx.distributed.Group) -> None:
    """Wait until every process is here."""
    any_of(False, group)


def refuse_disagreement(step: int, weights: Any, group: mx.distributed.Group) -> None:
    """Refuse to train if the processes differ in the steps done or in their weights.

    Raises:
        ValueError: in every process, naming what they do not agree on.
    """
    if group.size() == 1:
        return
    own = mx.array([step, *digest(weights)])
    most = mx.distributed.all_max(mx.concatenate([own, -own]), group=group, stream=mx.cpu)
    high, low = np.split(np.array(most), 2) * np.array([[1], [-1]])
    if high[0] != low[0]:
        raise ValueError(
            f"The processes start from steps {low[0]} to {high[0]}; give all of them the same "
            "checkpoints."
        )
    if (high != low).any():
        raise ValueError(
            f"The processes' weights differ at step {step}; give all of them the same checkpoints, "
            "models and options."
        )


def digest(weights: Any) -> list[int]:
    """Hash a tree of arrays, as small numbers that processes can compare."""
    found = hashlib.sha256()
    for name, value in dict(tree_flatten(weights)).items():
        found.update(name.encode())
        found.update(np.array(value.astype(mx.float32)).tobytes())
    return np.frombuffer(found.digest(), np.uint16).tolist()
