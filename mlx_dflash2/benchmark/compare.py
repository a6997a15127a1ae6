"""Compare the results of two benchmark runs, if they can be compared."""

from typing import Any

from .file import FIGURES, differences
from .report import number
from .tables import Part, Table, markdown

# Fields that have to be equal, or the figures mean different things.
SAME = (
    ("prompts", "sha256"),
    ("models", "target", "fingerprint"),
    ("settings", "max_tokens"),
    ("settings", "top_p"),
    ("settings", "top_k"),
    ("settings", "prefill_step_size"),
    ("settings", "adapter"),
    ("settings", "quantize_activations"),
    ("settings", "dense"),
    ("settings", "draft_vocab"),
    ("settings", "extra_eos_token"),
)


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return what differs between two runs from :func:`.file.read`, as Markdown.

    Raises:
        ValueError: naming the field that has to be equal and is not.
    """
    for path in SAME:
        one, other = _at(first, path), _at(second, path)
        if one != other:
            raise ValueError(
                f"These results cannot be compared: {'.'.join(path)} is {one} in the first and "
                f"{other} in the second."
            )
    arms = [arm for arm in first["overall"] if arm in second["overall"]]
    if not arms:
        raise ValueError(
            f"These results cannot be compared: no arm is in both; the first has "
            f"{', '.join(first['overall'])}, the second {', '.join(second['overall'])}."
        )
    found = differences(first, second, ("environment", "models", "settings"))
    changed = [[name, str(one), str(other)] for name, one, other in found]
    parts: list[Part] = [Table(["what differs", "first", "second"], changed)] if changed else []
    rows = []
    for arm in arms:
        for figure in FIGURES:
            one, other = (results["overall"][arm].get(figure) for results in (first, second))
            if one and other:
                scale = 1e9 if figure == "memory" else 1
                ratio = f"{other / one:.2f} ×"
                rows.append([arm, figure, number(one / scale), number(other / scale), ratio])
    parts.append(Table(["arm", "figure", "first", "second", "ratio"], rows))
    left = [arm for results in (first, second) for arm in results["overall"] if arm not in arms]
    if left:
        parts.append(f"In one of the two only: {', '.join(left)}.")
    return markdown(parts)


def _at(results: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        results = results.get(name) if isinstance(results, dict) else None
    return results
