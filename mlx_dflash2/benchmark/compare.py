"""Compare the results of two benchmark runs, if they can be compared."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import number, table

KIND, FORMAT = "mlx_dflash2.benchmark", 1
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
    ("settings", "extra_eos_token"),
)
FIGURES = ("acceptance_pooled", "decode_tps", "total_tps", "prompt_tps", "speedup", "memory")


def read(path: str | Path) -> dict[str, Any]:
    """Read results that the command wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds something else.
    """
    try:
        results = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    kind = (results.get("kind"), results.get("format")) if isinstance(results, dict) else None
    if kind != (KIND, FORMAT):
        raise ValueError(f"{path} does not hold results of {KIND}, format {FORMAT}.")
    return results


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return what differs between two runs from :func:`read`, as Markdown.

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
    arms = [arm for arm in first["mean"] if arm in second["mean"]]
    if not arms:
        raise ValueError(
            f"These results cannot be compared: no arm is in both; the first has "
            f"{', '.join(first['mean'])}, the second {', '.join(second['mean'])}."
        )
    changed = [[name, str(one), str(other)] for name, one, other in _differences(first, second)]
    parts = [table(["what differs", "first", "second"], changed)] if changed else []
    rows = []
    for arm in arms:
        for figure in FIGURES:
            one, other = (results["mean"][arm].get(figure) for results in (first, second))
            if one and other:
                scale = 1e9 if figure == "memory" else 1
                ratio = f"{other / one:.2f} ×"
                rows.append([arm, figure, number(one / scale), number(other / scale), ratio])
    parts.append(table(["arm", "mean of the suites", "first", "second", "ratio"], rows))
    left = [arm for results in (first, second) for arm in results["mean"] if arm not in arms]
    if left:
        parts.append(f"In one of the two only: {', '.join(left)}.")
    return "\n\n".join(parts)


def _at(results: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        results = results.get(name) if isinstance(results, dict) else None
    return results


def _differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for part in ("environment", "models", "settings"):
        one, other = (dict(_leaves(results[part])) for results in (first, second))
        for name in one | other:
            if one.get(name) != other.get(name):
                yield f"{part}.{name}", one.get(name), other.get(name)


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, entry in value.items():
        if isinstance(entry, dict):
            yield from _leaves(entry, f"{prefix}{name}.")
        else:
            yield prefix + name, entry
