"""The admin HTTP client against a server that answers as oMLX's routes are described."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.omlx_tools import MODEL, FakeServer, settings

from mlx_dflash2.omlx.admin import Admin, AdminError
from mlx_dflash2.omlx.arguments import setup_arg_parser
from mlx_dflash2.omlx.remote import apply_settings, disable_remote


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "models" / MODEL
    path.mkdir(parents=True)
    return path


@pytest.fixture
def server(folder):
    with FakeServer(folder) as running:
        yield running


@pytest.fixture
def admin(server):
    session = Admin(server.url)
    session.login("sk-secret")
    return session


def test_login(server):
    session = Admin(server.url + "/")
    with pytest.raises(AdminError) as error:
        session.models()
    assert error.value.status == 401
    with pytest.raises(AdminError) as error:
        session.login("sk-wrong")
    assert error.value.status == 401 and "sk-wrong" not in str(error.value)
    session.login("sk-secret")
    assert list(session.models()) == [MODEL]
    server.key = None
    with pytest.raises(AdminError, match="HTTP 400: No API key configured"):
        session.login("any")


def test_apply_and_disable(server, admin, folder, tmp_path):
    server.stored |= {"mtp_enabled": True, "dflash_draft_window_size": 1024}
    undo = {"undo_dir": tmp_path / "undo"}
    before = dict(server.stored)
    with pytest.raises(ValueError, match="mtp_enabled: found true"):
        apply_settings(admin, settings(), folder, **undo)
    dry = apply_settings(admin, settings(), folder, replace_mtp=True, dry_run=True, **undo)
    assert "+" in dry.diff and server.puts == [] and server.stored == before
    done = apply_settings(
        admin, settings(), folder, replace_mtp=True, unset=["dflash_draft_window_size"], **undo
    )
    ours = settings()["models"][MODEL]
    assert server.puts == [{"dflash_draft_window_size": None} | ours]
    assert server.stored == {"temperature": 1.0} | ours
    assert "POST /admin/api/reload" in server.calls and not done.empty
    assert apply_settings(admin, settings(), folder, **undo).empty and len(server.puts) == 1
    assert disable_remote(admin, MODEL, dry_run=True, **undo).after["mtp_enabled"] is True
    disable_remote(admin, MODEL, **undo)
    assert {k: v for k, v in server.stored.items() if v} == before
    assert disable_remote(admin, MODEL, **undo).empty


def test_build_without_block_size_is_found_and_put_back(server, admin, folder, tmp_path):
    server.knows_block = False
    with pytest.raises(ValueError, match=r"too old for DFlash 2; allowed: oMLX 0\.6\.2-dflash2"):
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)
    assert {k: v for k, v in server.stored.items() if v} == {"temperature": 1.0}
    assert disable_remote(admin, MODEL, undo_dir=tmp_path).empty


def test_settings_lost_at_reload_are_found(server, admin, folder, tmp_path):
    server.forget_on_reload = "dflash_draft_model"
    with pytest.raises(ValueError, match="dflash_draft_model: the server stored null"):
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)
    assert not server.stored.get("dflash_enabled")


@pytest.fixture
def silent(monkeypatch):
    """Make the answers to some requests get lost after the server has done what they ask."""

    def start(*requests):
        call, seen = Admin._call, []

        def lossy(self, method, path, body=None):
            answer = call(self, method, path, body)
            seen.append(method)
            if (method, seen.count(method)) in requests:
                with closing_server() as url:
                    call(Admin(url), method, path, body)
            return answer

        monkeypatch.setattr(Admin, "_call", lossy)

    return start


@pytest.mark.parametrize("lost", ["PUT", "POST"])
def test_a_lost_answer_takes_the_settings_back(server, admin, folder, tmp_path, silent, lost):
    silent((lost, 1))
    with pytest.raises(ValueError, match=r"no whole answer .*the settings are as before$"):
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)
    assert {k: v for k, v in server.stored.items() if v} == {"temperature": 1.0}
    assert disable_remote(admin, MODEL, undo_dir=tmp_path).empty


def test_settings_that_cannot_be_taken_back_can_be_disabled(
    server, admin, folder, tmp_path, silent
):
    server.forget_on_reload = "dflash_draft_model"
    silent(("PUT", 2))
    with pytest.raises(ValueError, match=r"are on the server .*could not be taken back") as error:
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)
    line = str(error.value)
    assert "\n" not in line and "as before" not in line and "the server stored null" in line
    command = line.partition("`mlx_dflash2.omlx ")[2].partition("`")[0].split()
    args = setup_arg_parser().parse_args(command)
    assert (args.command, args.running, args.write) == ("disable", True, True)
    assert (args.model, args.url) == (MODEL, server.url)
    server.stored |= settings()["models"][MODEL]
    disable_remote(admin, MODEL, undo_dir=tmp_path)
    assert {k: v for k, v in server.stored.items() if v} == {"temperature": 1.0}


def test_a_refused_change_is_not_taken_back(server, admin, folder, tmp_path):
    server.model["dflash_compatible"] = None
    with pytest.raises(AdminError, match="HTTP 400: not compatible"):
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)
    assert len(server.puts) == 1


def test_no_reload(server, admin, folder, tmp_path):
    apply_settings(admin, settings(), folder, reload=False, undo_dir=tmp_path)
    assert "POST /admin/api/reload" not in server.calls


def test_server_that_does_not_match(server, admin, folder, tmp_path):
    def refused(words, **kwargs):
        with pytest.raises(ValueError, match=words):
            apply_settings(admin, settings(**kwargs), folder, undo_dir=tmp_path)
        assert server.puts == []

    refused(f"give --model-id {MODEL}", model="other-name")
    server.model["model_path"] = "/not/here"
    refused(f"a model of the server: {MODEL}", model="other-name")
    server.model["model_path"] = str(tmp_path)
    refused(f"allowed: {tmp_path}, the server's")
    server.model |= {"model_path": str(folder), "dflash_compatible": False}
    server.model["dflash_compatibility_reason"] = "unknown type"
    refused("the server refuses DFlash for it: unknown type")
    with pytest.raises(ValueError, match="a model of the server"):
        disable_remote(admin, "other-name", undo_dir=tmp_path)


def test_traps_stored_on_the_server_are_refused(server, admin, folder, tmp_path):
    server.stored["dflash_max_ctx"] = 0
    with pytest.raises(ValueError, match="dflash_max_ctx: found 0"):
        apply_settings(admin, settings(), folder, undo_dir=tmp_path)


def test_put_refused_by_the_server_changes_nothing(server, admin, tmp_path):
    server.stored["mtp_enabled"] = True
    with pytest.raises(AdminError, match="HTTP 400: mtp_enabled and dflash_enabled"):
        admin.put_settings(MODEL, {"dflash_enabled": True})
    with pytest.raises(AdminError, match="HTTP 404"):
        admin.put_settings("Größe", {"dflash_enabled": True})
    assert "PUT /admin/api/models/Größe/settings" in server.calls


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ValueError, match="no server answers"):
        Admin(url).models()


def test_a_connection_that_ends_without_an_answer():
    with closing_server() as url, pytest.raises(ValueError, match="no whole answer") as error:
        Admin(url).models()
    assert url in str(error.value) and "\n" not in str(error.value)


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"no whole answer .*timed out"):
            Admin(url, timeout=0.2).models()


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_breaks_off(status):
    with other_server(status, "{}", {"Content-Length": "9"}, keep_open=True) as url:
        with pytest.raises(ValueError, match=r"no whole answer .*timed out"):
            Admin(url, timeout=0.2).models()


@pytest.mark.parametrize(
    "status, body", [(200, "<html>"), (200, '{"models": 1}'), (200, '[{"name": "x"}]')]
)
def test_something_else_listens(status, body):
    with other_server(status, body, {}) as url, pytest.raises(ValueError, match="is this oMLX"):
        Admin(url).models()


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed(status):
    seen = []
    with other_server(200, "{}", {}, seen) as elsewhere:
        headers = {"Location": elsewhere + "/admin/api/login"}
        with other_server(status, "", headers) as url, pytest.raises(AdminError) as error:
            Admin(url).login("sk-secret")
    assert error.value.status == status and seen == []


def test_proxies_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    session = Admin(server.url)
    session.login("sk-secret")
    assert MODEL in session.models()


@contextmanager
def closing_server():
    """A server that takes a request and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class other_server:
    """Something that is not oMLX: one fixed answer to everything."""

    def __init__(self, status, body, headers, seen=None, keep_open=False):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if seen is not None:
                    seen.append(self.path)
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())
                if keep_open:
                    # The client gives up first, and closes its end.
                    self.rfile.read(1)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{self._http.server_port}"

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()


def test_undo_record_holds_no_key(server, admin, folder, tmp_path):
    apply_settings(admin, settings(), folder, undo_dir=tmp_path / "undo")
    (record,) = (tmp_path / "undo").iterdir()
    assert "sk-secret" not in record.read_text()
    assert json.loads(record.read_text())["place"] == server.url
