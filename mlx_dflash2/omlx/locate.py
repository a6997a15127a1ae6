"""Where oMLX keeps its settings, and under which id it knows a model."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from .merge import SETTINGS_NAME
from .settings import check_model_id, is_repo_id

DEFAULT_URL = "http://127.0.0.1:8000"
_APP_FILE = Path("Library", "Application Support", "oMLX", "base-path")


@dataclass(frozen=True)
class Target:
    """A model as oMLX knows it."""

    model_id: str
    folder: Path
    warnings: tuple[str, ...] = ()


def base_dir(
    given: str | None = None,
    environ: Mapping[str, str] = os.environ,
    home: Path | None = None,
) -> Path:
    """Find oMLX's base directory in oMLX's own order.

    Args:
        given (str, optional): The directory the server is started with.
        environ (dict): Where ``OMLX_BASE_PATH`` is looked up.
        home (Path, optional): The home directory. Default: the user's.
    Returns:
        Path: An existing directory.
    Raises:
        ValueError: If more than one directory may be the one in use.
        FileNotFoundError: If the directory does not exist.
    """
    home = home or Path.home()
    if given is not None:
        return _existing(Path(given).expanduser(), "--base-path")
    stated = []
    if environ.get("OMLX_BASE_PATH"):
        stated.append(("OMLX_BASE_PATH", Path(environ["OMLX_BASE_PATH"]).expanduser()))
    app_file = home / _APP_FILE
    if app_file.is_file() and (text := app_file.read_text(encoding="utf-8").strip()):
        stated.append(("the oMLX app", Path(text).expanduser()))
    default = home / ".omlx"
    if not stated or (default / SETTINGS_NAME).exists():
        stated.append(("the default", default))
    if len({os.path.realpath(path) for _, path in stated}) > 1:
        found = ", ".join(f"{path} ({source})" for source, path in stated)
        raise ValueError(f"base directory: found {found}, allowed: one; choose with --base-path")
    source, path = stated[0]
    return _existing(path, source)


def _existing(path: Path, source: str) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"base directory: {path} from {source} does not exist; start oMLX once, or give "
            "--base-path"
        )
    return path.absolute()


def discover(model_dirs: Sequence[Path]) -> dict[str, Path]:
    """List the models oMLX finds: one or two levels deep, the first of a name wins.

    Args:
        model_dirs (list): The server's model directories, in its order.
    Returns:
        dict: Model id to folder.
    """
    found: dict[str, Path] = {}
    for model_dir in model_dirs:
        for child in _folders(model_dir):
            for folder in [child] if (child / "config.json").is_file() else _folders(child):
                adapter = (folder / "adapter_config.json").is_file()
                if (folder / "config.json").is_file() and not adapter:
                    found.setdefault(folder.name, folder)
    return found


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        for child in sorted(parent.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield child


def find_target(target: str, model_dirs: Sequence[Path], model_id: str | None = None) -> Target:
    """Find a target's folder and its id.

    Args:
        target (str): A model folder, or the name of one below `model_dirs`.
        model_dirs (list): The server's model directories.
        model_id (str, optional): The id, where the server shows another one.
    Returns:
        Target: The model; its warnings say what could not be made certain.
    Raises:
        ValueError: If it is no folder and no id, or another folder has the same name.
    """
    models = discover(model_dirs)
    if not Path(target).expanduser().is_dir():
        check_model_id(target)
        if target not in models:
            raise ValueError(f"target: found {target!r}, allowed: a model folder{_names(models)}")
        return Target(model_id or target, models[target])
    folder = _as_listed(Path(os.path.abspath(Path(target).expanduser())))
    hub_id = _hub_id(folder)
    if hub_id is not None:
        note = f"hub cache: older builds of oMLX know {hub_id} by the part after '--'"
        return Target(model_id or hub_id, _snapshot(folder), () if model_id else (note,))
    name = model_id or folder.name
    check_model_id(name)
    other = models.get(name)
    if other is None:
        where = " or ".join(map(str, model_dirs))
        return Target(
            name,
            folder,
            (
                f"{folder} is not below {where}: oMLX lists it only if "
                "its --model-dir is the folder above",
            ),
        )
    if not other.samefile(folder):
        raise ValueError(
            f"target: found {folder}, allowed: {other}, which comes first among models named "
            f"{name!r}"
        )
    return Target(name, folder)


def _names(models: Mapping[str, Path]) -> str:
    return f", or one of {', '.join(sorted(models))}" if models else ""


def _as_listed(folder: Path) -> Path:
    """The folder with its name spelled as a directory listing spells it, which is oMLX's id.

    A case-insensitive or normalising file system opens other spellings too.
    """
    siblings = list(folder.parent.iterdir())
    if folder in siblings:
        return folder
    return next((s for s in siblings if s.is_dir() and s.samefile(folder)), folder)


def _hub_folder(folder: Path) -> Path | None:
    """The ``models--Org--Name`` folder at or above a hub cache path."""
    for candidate in (folder, *folder.parents):
        if candidate.name.startswith("models--") and candidate.name.count("--") >= 2:
            return candidate
    return None


def _hub_id(folder: Path) -> str | None:
    hub = _hub_folder(folder)
    return hub.name.removeprefix("models--") if hub else None


def _snapshot(folder: Path) -> Path:
    """The snapshot oMLX would load: that of refs/main or refs/master, else the newest."""
    hub = _hub_folder(folder)
    if hub is None or folder != hub:
        return folder
    for name in ("main", "master"):
        ref = hub / "refs" / name
        if ref.is_file():
            return hub / "snapshots" / ref.read_text(encoding="utf-8").strip()
    snapshots = list(_folders(hub / "snapshots"))
    if not snapshots:
        raise FileNotFoundError(f"{hub}: no snapshot; the download is not complete")
    return max(snapshots, key=lambda path: path.stat().st_mtime)


def find_drafter(drafter: str) -> Path:
    """Find a drafter's folder; its real path means the same wherever oMLX is started.

    Args:
        drafter (str): A folder, or the repo id of a drafter in the local hub cache.
    Returns:
        Path: The real path.
    Raises:
        FileNotFoundError: If it is not on this disk.
    """
    folder = Path(drafter).expanduser()
    if not folder.is_dir() and is_repo_id(drafter):
        try:
            folder = Path(snapshot_download(drafter, local_files_only=True))
        except LocalEntryNotFoundError:
            raise FileNotFoundError(
                f"drafter: {drafter!r} is not on this disk; run `hf download {drafter}` first"
            ) from None
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter: found {drafter!r}, allowed: a folder or owner/name")
    return Path(os.path.realpath(_snapshot(folder.absolute())))


def server_answers(url: str, timeout: float = 1.0) -> bool:
    """Whether something listens where oMLX would; no answer does not prove that none runs.

    Args:
        url (str): Such as ``http://127.0.0.1:8000``.
        timeout (float): Seconds to wait.
    Returns:
        bool: True if a connection is accepted.
    Raises:
        ValueError: If the URL names no host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url: found {url!r}, allowed: such as {DEFAULT_URL}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout):
            return True
    except OSError:
        return False
