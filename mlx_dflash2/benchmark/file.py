"""The file of a benchmark's results, which an interrupted run goes on from."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KIND, FORMAT = "mlx_dflash2.benchmark", 2
# What has to be equal for a run to go on.
PLAN = ("environment", "models", "prompts", "settings")
# Numbers of each arm that are compared.
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
    for part in (*PLAN, "overall"):
        if not isinstance(results.get(part), dict):
            raise ValueError(f"{path} has no `{part}` of results.")
    for arm, figures in results["overall"].items():
        found = [figures.get(name) for name in FIGURES] if isinstance(figures, dict) else [""]
        if not all(value is None or type(value) in (int, float) for value in found):
            raise ValueError(f"{path} has figures of `{arm}` that are not numbers.")
    return results


def unfinished(path: Path | None, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of an interrupted benchmark, to go on from.

    Args:
        path (Path, optional): The file of the results; ``None`` or a missing one has no runs.
        plan (dict): The parts named in ``PLAN`` of the run that begins.

    Raises:
        ValueError: if the file holds an unfinished run of another plan, which would be lost.
    """
    if path is None or not path.exists():
        return []
    found = read(path)
    if found.get("complete") is not False:
        return []
    for name, old, new in differences(found, json.loads(json.dumps(plan)), PLAN):
        raise ValueError(
            f"{path} holds an unfinished run whose {name} was {old} but is {new} now; give another "
            "file, or remove this one."
        )
    return list(found["samples"])


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results, so that a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def differences(
    first: dict[str, Any], second: dict[str, Any], parts: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of every leaf that differs."""
    for part in parts:
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
