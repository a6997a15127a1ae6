"""Random damage to files: of their bytes, and of the values that they hold as JSON."""

import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 7, 10**9, 10**30, -(2**31), 2**31, 2**64, 0.5, -0.5, 1e300,
    float("nan"), float("inf"), "", "x", "4", "true", "null", "é\u0000", "../..", [], [None],
    ["x"], [0], [[1]], [1, 2, 3], {}, {"x": 1}, {"a": {"b": []}}, {"model_type": 3},
]  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, doubled, in another encoding, or with other bytes somewhere."""
    kind = rng.randrange(8)
    place = rng.randrange(len(data) + 1)
    match kind:
        case 0:
            return data[:place]
        case 1:
            return b""
        case 2:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        case 3:
            return data[:place] + bytes(rng.randrange(128, 256) for _ in range(4)) + data[place:]
        case 4:
            return data[:place] + data[place + rng.randrange(1, 40) :]
        case 5:
            return data[:place] + data[: rng.randrange(1, 40)] + data[place:]
        case 6:
            return data.decode("latin-1").encode("utf-16")
        case _:
            return b"\x00" * rng.randrange(1, 40) + data


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one node of it gone, replaced, doubled or renamed."""
    value = json.loads(json.dumps(value))
    nodes = list(_places(value))
    if not nodes or rng.random() < 0.02:
        return rng.choice(ODD)
    parent, key = rng.choice(nodes)
    kind = rng.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[str(key) + "x"] = parent.pop(key)
    elif kind == 2:
        parent[key] = [parent[key]]
    elif kind == 3 and isinstance(parent[key], int | float):
        parent[key] = str(parent[key])
    else:
        parent[key] = rng.choice(ODD)
    return value


def _places(value: Any):
    """Every place in a value, as what holds it and its key; few of a long list."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))[:20]
    else:
        return
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON file with a wrong value, and now and then wrong bytes."""
    if rng.random() < 0.25:
        return damaged_bytes(data, rng)
    if rng.random() < 0.05:
        return b"\xef\xbb\xbf" + data
    return json.dumps(damaged_value(json.loads(data), rng)).encode()


def damaged_lines(data: bytes, rng: random.Random) -> bytes:
    """A JSONL file with one such line."""
    lines = data.splitlines()
    index = rng.randrange(len(lines))
    lines[index] = damaged_json(lines[index], rng)
    return b"\n".join(lines) + b"\n"


def damaged_tensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, or cut off; values of tensors stay."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return damaged_bytes(data[: size + 8], rng) + data[size + 8 :]
    if rng.random() < 0.1:
        return data[: rng.randrange(len(data))]
    header = json.loads(data[8 : size + 8])
    if rng.random() < 0.4 and "__metadata__" in header:
        header["__metadata__"] = damaged_value(header["__metadata__"], rng)
    else:
        header = damaged_value(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[size + 8 :]
