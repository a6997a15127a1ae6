"""A hub of models on this machine that counts what it is asked for."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


class Hub:
    """Serves folders as repositories, in the form that ``huggingface_hub`` expects.

    Attributes:
        repos (dict): Folders by the names of their repositories.
        asked (Counter): Downloads by repository and file, and look-ups by repository and "".
    """

    def __init__(self, repos: dict[str, Path]):
        self.repos, self.asked = repos, Counter()

    def answer(self, path: str, downloads: bool) -> tuple[bytes, str] | None:
        """The body and the ETag for a path; ``None`` if there is nothing."""
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo, (kind, *rest) = "/".join(parts[:2]), parts[2:] or [""]
        if repo not in self.repos:
            # Such as what the client tells about itself.
            return None
        files = [file for file in sorted(self.repos[repo].iterdir()) if file.is_file()]
        if kind == "revision":
            self.asked[repo, ""] += 1
            names = [{"rfilename": file.name} for file in files]
            return json.dumps({"id": repo, "sha": COMMIT, "siblings": names}).encode(), ""
        if kind == "tree":
            entries = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)}
                for f in files
            ]
            return json.dumps(entries).encode(), ""
        file = self.repos[repo] / "/".join(rest[1:])
        self.asked[repo, file.name] += downloads
        return (file.read_bytes(), _etag(file)) if file.is_file() else None


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def local_hub(cache: Path, repos: dict[str, Path]) -> Iterator[Hub]:
    """A running hub, which is the only one that ``huggingface_hub`` knows meanwhile."""
    hub = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = hub.answer(urlsplit(self.path).path, self.command == "GET")
            body, etag = found or (b"{}", "")
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            if not found and self.path.startswith("/api/"):
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
            patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            yield hub
    finally:
        server.shutdown()
        server.server_close()
