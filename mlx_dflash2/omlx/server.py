"""A running oMLX: its admin HTTP interface, and changes that it is seen to keep."""

import contextlib
import json
import shlex
import socket
import threading
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from .change import Entry, Models, NotTakenBack, SettingsChange
from .options import DEFAULT_URL
from .settings import TOO_OLD

# A change may make the server load models before it answers.
CHANGE_SECONDS = 600.0
_MAX_ANSWER = 8 * 2**20


class AdminError(ValueError):
    """The server refused a request; ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Admin:
    """A session with the server at a URL; it keeps a cookie in memory and never the key.

    ``timeout`` is the seconds for the whole of an answer.
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        self.secure, self.host, self._port = split_url(url)
        self._headers = {"Content-Type": "application/json"}

    def login(self, key: str) -> None:
        """Log in with the server's main API key."""
        self._call("POST", "/admin/api/login", {"api_key": key, "remember": False})

    def version(self) -> str | None:
        """Ask for the server's version, None if it does not tell one of oMLX."""
        with contextlib.suppress(ValueError):
            info = _object(self._call("GET", "/openapi.json").get("info"))
            return str(info.get("version")) if "oMLX" in str(info.get("title")) else None
        return None

    def models(self) -> dict[str, dict[str, Any]]:
        """List the server's models by id, each with what the server says about it."""
        models = self._call("GET", "/admin/api/models").get("models")
        if not isinstance(models, list) or not all(map(_is_model, models)):
            raise ValueError(f"{self.url}: the answer is not a list of models; is this oMLX?")
        return {model["id"]: model for model in models}

    def put_settings(self, model_id: str, settings: Mapping[str, Any]) -> Entry:
        """Change some settings of a model, null resetting a key, and return what is stored."""
        path = f"/admin/api/models/{quote(model_id, safe='')}/settings"
        return _object(self._call("PUT", path, settings, CHANGE_SECONDS).get("settings"))

    def reload(self) -> None:
        """Make the server read its settings file again; this unloads every model."""
        self._call("POST", "/admin/api/reload", None, CHANGE_SECONDS)

    def _call(self, method: str, path: str, body: Any = None, seconds: float = 0) -> dict[str, Any]:
        seconds = max(seconds, self._timeout)
        # http.client uses no proxy and follows no redirect: the key goes nowhere else.
        kind = HTTPSConnection if self.secure else HTTPConnection
        connection = kind(self.host, self._port, timeout=seconds)
        # A server that sends a byte now and then never runs into the time-out of one read.
        timer = threading.Timer(seconds, _hang_up, (connection,))
        started = time.monotonic()
        timer.start()
        try:
            data = None if body is None else json.dumps(body).encode("utf-8")
            connection.request(method, urlsplit(self.url).path + path, data, self._headers)
            response = connection.getresponse()
            raw = response.read(_MAX_ANSWER)
            if response.length or response.read(1):
                raise HTTPException("it is cut off, or longer than 8 MB")
        except (OSError, HTTPException, UnicodeError) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() - started >= seconds
            reason = f"not within {seconds:g} s" if late else str(error) or type(error).__name__
            raise ValueError(f"{self.url}{path}: no whole answer ({reason})") from None
        finally:
            timer.cancel()
            connection.close()
        try:
            answer = _object(json.loads(raw))
        except (ValueError, RecursionError):
            answer = {}
        if not 200 <= response.status < 300:
            moved = response.headers.get("Location")
            detail = f"it redirects to {moved}, which is not followed" if moved else _detail(answer)
            detail = "".join(c if c.isprintable() else " " for c in detail)[:500]
            raise AdminError(response.status, f"{method} {path}: HTTP {response.status}: {detail}")
        if not answer:
            raise ValueError(f"{self.url}{path}: the answer is not a JSON object; is this oMLX?")
        for cookie in response.headers.get_all("Set-Cookie") or ():
            self._headers["Cookie"] = cookie.partition(";")[0]
        return answer


def split_url(url: str) -> tuple[bool, str, int]:
    """Take the URL of an HTTP server apart: whether it is https, its host and its port."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        plain = url.isprintable() and " " not in url
        if parts.hostname and (secure or parts.scheme == "http") and plain:
            return secure, parts.hostname, parts.port or (443 if secure else 80)
    raise ValueError(f"url: found {url!r}, allowed: such as {DEFAULT_URL}")


def server_answers(url: str, timeout: float = 1.0) -> bool:
    """Whether something listens where oMLX would; no answer does not prove that none runs."""
    try:
        with socket.create_connection(split_url(url)[1:], timeout):
            return True
    except (OSError, UnicodeError):
        return False


def stored_settings(model: Mapping[str, Any]) -> Entry:
    """Read a model's settings; the server may show a key that is not set as null."""
    return {k: v for k, v in (model.get("settings") or {}).items() if v is not None}


def server_id(models: Models, model_id: str, folder: Path | None) -> str:
    """Find the id by which the server knows a folder, and check that it runs DFlash for it."""
    paths = {name: Path(model.get("model_path") or "/nowhere") for name, model in models.items()}
    # The paths of another machine cannot be seen from here.
    seen = {name: path for name, path in paths.items() if folder and path.is_dir()}
    same = [name for name, path in seen.items() if folder and path.samefile(folder)]
    if not same and (model_id not in models or model_id in seen):
        names = ", ".join(sorted(models)) or "none"
        found = f"{model_id!r}" + (f" in {folder}" if folder else "")
        raise ValueError(f"target: found {found}, allowed: a model of the server: {names}")
    model_id = model_id if model_id in same or not same else same[0]
    if folder and models[model_id].get("dflash_compatible") is False:
        reason = models[model_id].get("dflash_compatibility_reason") or "no reason given"
        raise ValueError(f"{model_id}: the server refuses DFlash for it: {reason}")
    return model_id


def send_change(admin: Admin, change: SettingsChange, reload: bool = True) -> None:
    """Make a planned change on the server, and check that it keeps it.

    Whatever fails, the settings are as before, unless the error says that they could not be
    taken back.
    """
    model_id, values, answered = change.model_id, change.values, False
    wanted = {k: v for k, v in values.items() if v is not None}
    wanted["dflash_enabled"] = bool((change.after or {}).get("dflash_enabled"))
    with change.recorded():
        try:
            stored = admin.put_settings(model_id, values)
            answered = True
            _check_kept(stored, wanted)
            if reload:
                admin.reload()
                shown = stored_settings(admin.models().get(model_id) or {})
                # This list does not show every key; the two that decide are always in it.
                keys = {"dflash_enabled", "dflash_draft_model", *shown}
                _check_kept(shown, {k: v for k, v in wanted.items() if k in keys})
        except ValueError as error:
            before = {key: (change.before or {}).get(key) for key in values}
            try:
                # If the server refused the change itself, there is nothing to take back.
                if answered or not isinstance(error, AdminError):
                    admin.put_settings(model_id, before)
            except ValueError as again:
                name, url = shlex.quote(model_id), shlex.quote(admin.url)
                raise NotTakenBack(
                    f"{error}; the new settings are on the server and could not be taken back "
                    f"({again}); `mlx_dflash2.omlx disable --running --write --model {name} "
                    f"--url {url}` undoes them"
                ) from None
            raise ValueError(f"{error}; the settings are as before") from None


def _check_kept(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        found, meant = json.dumps(stored.get(key)), json.dumps(value)
        # A switch that is off may be shown by leaving it out.
        if found == meant or (found, meant) == ("null", "false"):
            continue
        if key == "dflash_block_size" and found == "null":
            raise ValueError(f"dflash_block_size: the server did not keep it, so it {TOO_OLD}")
        raise ValueError(f"{key}: the server stored {found}, not {meant}")


def _is_model(value: Any) -> bool:
    shape = (_object(value).get(key) for key in ("id", "settings", "model_path"))
    return all(map(isinstance, shape, (str, dict | None, str | None)))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _detail(answer: Mapping[str, Any]) -> str:
    """What a refusal says, without what it repeats of the request, which may hold the key."""
    detail = answer.get("detail")
    if isinstance(detail, list):
        detail = "; ".join(f"{_object(e).get('loc')}: {_object(e).get('msg')}" for e in detail)
    return detail if isinstance(detail, str) else "no explanation"


def _hang_up(connection: HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)
