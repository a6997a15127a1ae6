"""A client of oMLX's admin HTTP interface."""

import http.client
import http.cookiejar
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any


class AdminError(ValueError):
    """The server refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # A redirect could carry the key to another host.
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Admin:
    """A session with one server; it keeps a cookie in memory and never the key.

    Args:
        url (str): Such as ``http://127.0.0.1:8000``.
        timeout (float): Seconds to wait for an answer; a reload may load pinned models first.
            Default: ``600``.
    """

    def __init__(self, url: str, timeout: float = 600.0):
        self.url = url.rstrip("/")
        self._timeout = timeout
        # An empty proxy table: requests to this machine must not pass through a proxy.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()),
            _NoRedirect(),
        )

    def login(self, key: str) -> None:
        """Log in with the server's main API key.

        Args:
            key (str): The key.
        Raises:
            AdminError: If the server refuses it.
        """
        self._call("POST", "/admin/api/login", {"api_key": key, "remember": False})

    def models(self) -> dict[str, dict[str, Any]]:
        """List the server's models.

        Returns:
            dict: Model id to what the server says about the model.
        Raises:
            AdminError: If the server refuses, with status 401 before a login.
            ValueError: If the answer is not that of an oMLX server.
        """
        answer = self._call("GET", "/admin/api/models")
        models = answer.get("models") if isinstance(answer, dict) else answer
        if not isinstance(models, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
        ):
            raise ValueError(f"{self.url}: the answer is no list of models; is this oMLX?")
        return {model["id"]: model for model in models}

    def put_settings(self, model_id: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Change some settings of a model; null resets a key.

        Args:
            model_id (str): The model.
            settings (dict): The keys to change.
        Returns:
            dict: The model's settings as the server now stores them.
        Raises:
            AdminError: If the server refuses.
        """
        path = f"/admin/api/models/{urllib.parse.quote(model_id, safe='')}/settings"
        answer = self._call("PUT", path, settings)
        stored = answer.get("settings") if isinstance(answer, dict) else None
        if not isinstance(stored, dict):
            raise ValueError(f"{self.url}: the answer holds no settings; is this oMLX?")
        return stored

    def reload(self) -> None:
        """Make the server read its settings file again; this unloads every model.

        Raises:
            AdminError: If the server refuses.
        """
        self._call("POST", "/admin/api/reload")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode("utf-8")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return json.loads(self._answer(request))
        except AdminError:
            raise
        except urllib.error.URLError as error:
            raise ValueError(f"{self.url}: no server answers ({error.reason})") from None
        except OSError as error:
            reason = str(error) or type(error).__name__
            raise ValueError(f"{self.url}{path}: no whole answer ({reason})") from None
        except (ValueError, http.client.HTTPException):
            raise ValueError(f"{self.url}{path}: the answer is no JSON; is this oMLX?") from None

    def _answer(self, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                detail = _detail(error.read())
            text = f"{request.get_method()} {request.selector}: HTTP {error.code}: {detail}"
            raise AdminError(error.code, text) from None


def _detail(raw: bytes) -> str:
    try:
        answer = json.loads(raw)
    except ValueError:
        return "no explanation"
    detail = answer.get("detail") if isinstance(answer, dict) else None
    return detail if isinstance(detail, str) else json.dumps(answer)[:200]
