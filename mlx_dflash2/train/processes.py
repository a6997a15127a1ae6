"""Several processes that train one drafter: what they have to decide together."""

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten


def any_of(flag: bool, group: mx.distributed.Group) -> bool:
    """Whether it holds for one of the processes at least."""
    if group.size() == 1:
        return flag
    return mx.distributed.all_sum(mx.array(int(flag)), group=group, stream=mx.cpu).item() > 0


def wait(group: mx.distributed.Group):
    """Wait until every process is here."""
    any_of(False, group)


def refuse_disagreement(step: int, weights: Any, group: mx.distributed.Group):
    """Refuse to train where the processes do not begin from one state.

    Args:
        step (int): Steps that this process' trainer has done.
        weights (dict): A tree of its weights.
        group (mx.distributed.Group): The processes.

    Raises:
        ValueError: in every process, naming what they do not agree on.
    """
    if group.size() == 1:
        return
    own = mx.array([step, *digest(weights)])
    most = mx.distributed.all_max(mx.concatenate([own, -own]), group=group, stream=mx.cpu)
    high, low = (part.tolist() for part in mx.split(most, 2))
    low = [-value for value in low]
    if high[0] != low[0]:
        raise ValueError(
            f"The processes begin from steps {low[0]} to {high[0]}; give all of them the same "
            "checkpoints."
        )
    if high != low:
        raise ValueError(
            f"The processes' weights differ at step {step}; give all of them the same checkpoints, "
            "models and options."
        )


def digest(weights: Any) -> list[int]:
    """A hash of a tree of arrays, as small numbers that processes can compare."""
    found = hashlib.sha256()
    for name, value in tree_flatten(weights):
        found.update(name.encode())
        found.update(np.array(value.astype(mx.float32)).tobytes())
    return np.frombuffer(found.digest(), np.uint16).tolist()
