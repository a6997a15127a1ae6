"""Where oMLX keeps its settings, which version it is, and under which id it knows a model."""

import os
import plistlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .change import Entry
from .file import SETTINGS_NAME
from .server import Admin, server_answers
from .settings import KEYS, NEWEST_OMLX, TOO_OLD, check_model_id, is_repo_id

APPS = (Path("/Applications/oMLX.app"), Path("~/Applications/oMLX.app"))
BREW = (Path("/opt/homebrew/opt/omlx/libexec"), Path("/usr/local/opt/omlx/libexec"))
_BASE_OF_APP = Path("Library", "Application Support", "oMLX", "base-path")


class OmlxVersion(NamedTuple):
    """A version of oMLX, where it was found, and all keys it has if its source was there."""

    number: str
    source: str
    keys: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"oMLX {self.number} ({self.source})"

    @classmethod
    def find(cls, given: str | None, url: str) -> "OmlxVersion":
        """Find the version: the one given, that of the server, or that of what is installed."""
        if given is not None:
            parse_version(given)
            return cls(given, "--omlx-version")
        asked = Admin(url, 2.0).version() if server_answers(url) else None
        found = cls(asked, url) if asked else next(_installed(), cls(NEWEST_OMLX, "assumed"))
        try:
            parse_version(found.number)
        except ValueError:
            return cls(NEWEST_OMLX, f"assumed, found {found}", found.keys)
        return found

    def check(self) -> None:
        """Refuse a version that cannot load a DFlash 2 drafter."""
        new = parse_version(self.number) >= parse_version("0.6.2-dflash2")
        if not new or "dflash_block_size" not in (self.keys or KEYS):
            raise ValueError(f"omlx_version: {self} {TOO_OLD}")

    def drafts_batched(self, model_type: str) -> bool:
        """Whether it drafts for such a target inside its batched engine."""
        return parse_version(self.number) >= (0, 7, 0) and model_type.startswith("qwen3_5")

    def notes(self, entry: Entry, model_type: str) -> list[str]:
        """Tell which settings have no effect in this version, and which are not known here."""
        foreign = sorted(entry.keys() - (self.keys or KEYS))
        foreign = [key for key in foreign if self.keys or key.startswith("dflash_")]
        idle = sorted(key for key in entry.keys() & KEYS.keys() if not KEYS[key].batched)
        idle = idle if self.drafts_batched(model_type) else []
        told = ("not known here, kept", foreign), ("without effect in its batched engine", idle)
        return [f"{self}: {words}: {', '.join(keys)}" for words, keys in told if keys]


def parse_version(text: str) -> tuple[int, ...]:
    """Turn an oMLX version, such as ``0.6.3rc1``, into a tuple that sorts in release order."""
    stages = {"dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, "post": 1, "dflash": 1}
    pattern = r"v?(\d+)\.(\d+)\.(\d+)(?:[.-]?(dev|a|b|rc|post|dflash)(\d+))?(?:\+.*)?"
    if (match := re.fullmatch(pattern, text)) is None:
        raise ValueError(f"omlx_version: found {text!r}, allowed: such as {NEWEST_OMLX}")
    major, minor, patch, stage, serial = match.groups()
    return int(major), int(minor), int(patch), stages[stage], int(serial or 0)


def _installed() -> Iterator[OmlxVersion]:
    """Read versions and settings keys out of what is installed, without running it."""
    spec = find_spec("omlx")
    packages = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    packages += [app.expanduser() / "Contents" / "Resources" / "omlx" for app in APPS]
    packages += [path for brew in BREW for path in brew.glob("lib/python3*/site-packages/omlx")]
    for folder in packages:
        files = (folder / "_version.py", folder / "model_settings.py")
        version, source = (file.read_text("utf-8") if file.is_file() else "" for file in files)
        numbers = re.findall(r"version__\s*=\s*[\"'](.+?)[\"']", version)
        if (plist := folder.parents[1] / "Info.plist").is_file():
            numbers = [plistlib.loads(plist.read_bytes()).get("CFBundleShortVersionString")]
        fields = source.partition("\nclass ModelSettings:")[2].partition("\n    def ")[0]
        keys = frozenset(re.findall(r"^    (\w+):", fields, re.M))
        if numbers or keys:
            yield OmlxVersion(str([*numbers, None][0]), str(folder), keys)


class ListedModel(NamedTuple):
    """A model as oMLX lists it; without a folder if it is not on this disk."""

    model_id: str
    folder: Path | None
    note: str = ""


def base_dir(
    given: str | None = None, environ: Mapping[str, str] = os.environ, home: Path | None = None
) -> Path:
    """Find oMLX's base directory in oMLX's own order; it must not be one of several."""
    home = home or Path.home()
    app_file, default = home / _BASE_OF_APP, home / ".omlx"
    app = app_file.read_text(encoding="utf-8").strip() if app_file.is_file() else ""
    stated = {"OMLX_BASE_PATH": environ.get("OMLX_BASE_PATH"), "the oMLX app": app}
    stated = {"--base-path": given} if given else {k: v for k, v in stated.items() if v}
    if not stated or (not given and (default / SETTINGS_NAME).exists()):
        stated["the default"] = str(default)
    paths = {source: Path(str(path)).expanduser().absolute() for source, path in stated.items()}
    found = ", ".join(f"{path} ({source})" for source, path in paths.items())
    if len({os.path.realpath(path) for path in paths.values()}) > 1:
        raise ValueError(f"base directory: found {found}, allowed: one; choose with --base-path")
    path = next(iter(paths.values()))
    if not path.is_dir():
        raise FileNotFoundError(f"base directory: there is no {found}; start oMLX once")
    return path


def discover(model_dirs: Sequence[Path]) -> dict[str, Path]:
    """Find the models that oMLX lists: one or two levels deep, the first of a name wins."""
    found: dict[str, Path] = {}
    for child in (child for folder in model_dirs for child in _folders(folder)):
        for folder in [child] if (child / "config.json").is_file() else _folders(child):
            adapter = (folder / "adapter_config.json").is_file()
            if (folder / "config.json").is_file() and not adapter:
                found.setdefault(folder.name, folder)
    return found


def _folders(parent: Path) -> list[Path]:
    children = sorted(parent.iterdir()) if parent.is_dir() else []
    return [child for child in children if child.is_dir() and not child.name.startswith(".")]


def find_target(
    target: str, model_dirs: Sequence[Path], model_id: str | None = None
) -> ListedModel:
    """Find a target, a model folder or the name of one below ``model_dirs``, and its id.

    ``model_id`` is the id where the server shows another one.
    """
    models, folder = discover(model_dirs), Path(os.path.abspath(Path(target).expanduser()))
    if not folder.is_dir():
        check_model_id(target)
        if target not in models:
            names = "".join(f", {name}" for name in sorted(models))
            raise ValueError(f"target: found {target!r}, allowed: a model folder{names}")
        return ListedModel(model_id or target, models[target])
    # A case-insensitive file system opens other spellings than the one that is listed.
    siblings = [path for path in folder.parent.iterdir() if path.is_dir()]
    if folder not in siblings:
        folder = next((path for path in siblings if path.samefile(folder)), folder)
    if (hub := _hub_folder(folder)) is not None:
        return ListedModel(model_id or hub.name.removeprefix("models--"), _snapshot(folder))
    name = model_id or folder.name
    check_model_id(name)
    if name in models and not models[name].samefile(folder):
        first = f"{models[name]}, the first model named {name!r}"
        raise ValueError(f"target: found {folder}, allowed: {first}")
    where = " or ".join(map(str, model_dirs))
    note = f"{folder} is not below {where}: oMLX lists it only if --model-dir is its parent"
    return ListedModel(name, folder, "" if name in models else note)


def _hub_folder(folder: Path) -> Path | None:
    """Find the ``models--Org--Name`` folder at or above a hub cache path."""
    places = (folder, *folder.parents)
    return next((path for path in places if re.match(r"models--.+--.", path.name)), None)


def _snapshot(folder: Path) -> Path:
    """Find the snapshot of a hub folder that oMLX would load: the main one, else the newest."""
    if folder != _hub_folder(folder):
        return folder
    for ref in (folder / "refs" / "main", folder / "refs" / "master"):
        if ref.is_file():
            return folder / "snapshots" / ref.read_text(encoding="utf-8").strip()
    return max(
        _folders(folder / "snapshots"), key=lambda path: path.stat().st_mtime, default=folder
    )


def find_drafter(drafter: str, model_dirs: Sequence[Path] = ()) -> Path:
    """Find the real path, which means the same everywhere, of a folder or a repo on this disk.

    An ``owner/name`` may lie below one of oMLX's ``model_dirs``, or in the hub's cache.
    """
    folder = Path(drafter).expanduser()
    if not folder.is_dir() and is_repo_id(drafter):
        below = [place / drafter for place in model_dirs]
        folder = next((path for path in below if path.is_dir()), folder)
    if not folder.is_dir() and is_repo_id(drafter):
        # The hub's client takes longer to start than all the rest of the command.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(drafter, local_files_only=True))
        except LocalEntryNotFoundError:
            remedy = f"run `hf download {drafter}` first"
            raise FileNotFoundError(f"drafter: {drafter!r} is not on this disk; {remedy}") from None
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter: found {drafter!r}, allowed: a folder or owner/name")
    return Path(os.path.realpath(_snapshot(folder.absolute())))
