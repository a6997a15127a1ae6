"""Read oMLX's settings document, and edit its text without touching what is not ours."""

import codecs
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from json.decoder import scanstring
from typing import Any

_WHITESPACE = " \t\n\r"
_DECODER = json.JSONDecoder()
EMPTY_TEXT = '{\n  "version": 1,\n  "models": {}\n}\n'


@dataclass(frozen=True)
class Member:
    """Where one member of a JSON object lies in the text: key, then value up to `end`."""

    key: str
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class Object:
    """Where a JSON object lies in the text: `start` is its ``{`` and `close` its ``}``."""

    start: int
    close: int
    members: tuple[Member, ...]

    def find(self, key: str) -> Member | None:
        """The member of this name, or None."""
        return next((m for m in self.members if m.key == key), None)


def parse_document(raw: bytes, model_id: str | None = None) -> tuple[str, dict[str, Any]]:
    """Decode a settings file, refusing whatever oMLX would not read as it was meant.

    Args:
        raw (bytes): The file's content.
        model_id (str, optional): A model whose entry is to be edited.
    Returns:
        tuple: The text, and the document as plain data.
    Raises:
        ValueError: If it is not UTF-8 JSON of the expected shape and version, or is ambiguous.
    """
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("found a byte order mark, with which oMLX reads no settings at all")
    try:
        text = raw.decode("utf-8")
        data = json.loads(text)
    except RecursionError:
        raise ValueError("found nesting too deep to read, allowed: JSON") from None
    except ValueError as error:
        raise ValueError(f"found text that cannot be read ({error}), allowed: UTF-8 JSON") from None
    _check_shape(data)
    top = _check_unique("document", scan_object(text, skip_space(text, 0)))
    models = _check_unique("models", scan_object(text, _member(top, "models").value))
    entry = models.find(model_id) if model_id is not None else None
    if entry is not None:
        _check_unique(f"models[{model_id!r}]", scan_object(text, entry.value))
    return text, data


def _check_shape(data: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"document: found {_kind(data)}, allowed: an object")
    version = data.get("version")
    if type(version) is not int or version != 1:
        found = json.dumps(version) if "version" in data else "no such key"
        raise ValueError(f"version: found {found}, allowed: 1")
    models = data.get("models")
    if not isinstance(models, dict):
        found = _kind(models) if "models" in data else "no such key"
        raise ValueError(f"models: found {found}, allowed: an object")
    for model_id, entry in models.items():
        if not isinstance(entry, dict):
            # One such entry makes oMLX forget the settings of every model.
            raise ValueError(f"models[{model_id!r}]: found {_kind(entry)}, allowed: an object")


def _check_unique(name: str, scope: Object) -> Object:
    keys = [m.key for m in scope.members]
    twice = next((k for k in keys if keys.count(k) > 1), None)
    if twice is not None:
        raise ValueError(f"{name}: found {twice!r} twice, allowed: each key once")
    return scope


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def skip_space(text: str, index: int) -> int:
    """The index of the next character that is not JSON whitespace."""
    while index < len(text) and text[index] in _WHITESPACE:
        index += 1
    return index


def scan_object(text: str, start: int) -> Object:
    """Find the members of the object that starts at `start`, in text known to be valid JSON.

    Args:
        text (str): The document.
        start (int): The index of the object's ``{``.
    Returns:
        Object: The spans of its members.
    """
    members = []
    index = skip_space(text, start + 1)
    while text[index] != "}":
        key, end = scanstring(text, index + 1)
        value = skip_space(text, skip_space(text, end) + 1)
        _, end = _DECODER.raw_decode(text, value)
        members.append(Member(key, index, value, end))
        index = skip_space(text, end)
        if text[index] == ",":
            index = skip_space(text, index + 1)
    return Object(start, index, tuple(members))


def _member(scope: Object, key: str) -> Member:
    member = scope.find(key)
    if member is None:
        raise KeyError(key)
    return member


def edit_entry(
    text: str, model_id: str, values: Mapping[str, Any], remove: Collection[str] = ()
) -> str:
    """Set and remove keys of one model; every other byte of the document stays as it is.

    Args:
        text (str): A document that `parse_document` accepted for this model.
        model_id (str): The model; its entry is added if it is missing.
        values (dict): The keys to set.
        remove (collection): The keys to remove; an entry left empty by that goes too.
    Returns:
        str: The new text.
    """
    top = scan_object(text, skip_space(text, 0))
    models = scan_object(text, _member(top, "models").value)
    member = models.find(model_id)
    if member is None:
        outer = _indent(text, top, "  ")
        return _insert(text, models, model_id, dict(values), outer) if values else text
    entry = scan_object(text, member.value)
    for key in remove:
        found = entry.find(key)
        if found is not None:
            text = _cut(text, entry, found)
            entry = scan_object(text, member.value)
    for key, value in values.items():
        found = entry.find(key)
        if found is not None:
            text = text[: found.value] + _dump(value) + text[found.end :]
        else:
            text = _insert(text, entry, key, value, _indent(text, models, "    "))
        entry = scan_object(text, member.value)
    if remove and not entry.members:
        models = scan_object(text, models.start)
        text = _cut(text, models, _member(models, model_id))
    return text


def _dump(value: Any, indent: str = "") -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if text != text.encode("utf-8", "ignore").decode("utf-8"):  # half a surrogate pair
        text = json.dumps(value, indent=2)
    return text.replace("\n", "\n" + indent)


def _indent(text: str, scope: Object, default: str) -> str:
    """The whitespace before the members of `scope`, from which its children's follows."""
    if not scope.members:
        return default
    gap = text[scope.start + 1 : scope.members[0].start]
    return gap.rpartition("\n")[2] if "\n" in gap else default


def _insert(text: str, scope: Object, key: str, value: Any, outer: str) -> str:
    """Add a member at the end of an object, laid out like the members it already has."""
    if scope.members:
        last = scope.members[-1]
        gap = text[scope.start + 1 : scope.members[0].start]
        added = "," + (gap or " ")
        head, tail = text[: last.end], text[last.end :]
        indent = gap.rpartition("\n")[2] if "\n" in gap else outer
    else:
        newline = "\r\n" if "\r\n" in text else "\n"
        indent = outer + "  "
        added, head = newline + indent, text[: scope.start + 1]
        tail = newline + outer + text[scope.close :]
    body = f"{_dump(key)}: {_dump(value, indent)}"
    if "\r\n" in text:
        body = body.replace("\n", "\r\n")
    return head + added + body + tail


def _cut(text: str, scope: Object, member: Member) -> str:
    """Remove a member with the one comma that belongs to it."""
    position = scope.members.index(member)
    if position > 0:
        return text[: scope.members[position - 1].end] + text[member.end :]
    if len(scope.members) > 1:
        return text[: member.start] + text[scope.members[1].start :]
    return text[: scope.start + 1] + text[scope.close :]
