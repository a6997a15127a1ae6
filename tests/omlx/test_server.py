"""The admin HTTP client, and changes of a server, where a real one cannot be made to fail."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.omlx_tools import MODEL, FakeServer, settings

from mlx_dflash2.omlx.change import plan_disable, plan_export
from mlx_dflash2.omlx.options import setup_arg_parser
from mlx_dflash2.omlx.server import (
    Admin,
    AdminError,
    send_change,
    server_answers,
    server_id,
    stored_settings,
)


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


@pytest.fixture
def undo_dir(tmp_path):
    return tmp_path / "undo"


@pytest.fixture
def apply(admin, undo_dir):
    def run(reload=True, **options):
        models = {name: stored_settings(model) for name, model in admin.models().items()}
        change = plan_export(admin.url, models, settings(), undo_dir=undo_dir, **options)
        if not change.empty:
            send_change(admin, change, reload)
        return change

    return run


@pytest.fixture
def disable(admin, undo_dir):
    def run():
        models = {name: stored_settings(model) for name, model in admin.models().items()}
        change = plan_disable(admin.url, models, MODEL, undo_dir=undo_dir)
        if not change.empty:
            send_change(admin, change, reload=False)
        return change

    return run


def on(server):
    return {key: value for key, value in server.stored.items() if value}


def test_apply_and_disable(server, apply, disable, undo_dir):
    server.stored |= {"mtp_enabled": True, "dflash_draft_window_size": 1024}
    before = dict(server.stored)
    with pytest.raises(ValueError, match="mtp_enabled: found true"):
        apply()
    assert server.puts == [] and server.stored == before
    apply(turn_off=["mtp_enabled"], unset=["dflash_draft_window_size"])
    ours = settings()["models"][MODEL]
    assert server.puts[0]["dflash_draft_window_size"] is None
    assert server.stored == {"temperature": 1.0, "mtp_enabled": False} | {
        key: value for key, value in ours.items() if key != "vlm_mtp_enabled"
    } | {"vlm_mtp_enabled": False}
    assert "POST /admin/api/reload" in server.calls
    assert apply().empty and len(server.puts) == 1
    disable()
    assert on(server) == before and list(undo_dir.iterdir()) == []
    assert disable().empty


def test_build_without_block_size_is_found_and_put_back(server, apply, disable, undo_dir):
    server.knows_block = False
    with pytest.raises(ValueError, match=r"too old for DFlash 2; allowed: oMLX 0\.6\.2-dflash2"):
        apply()
    assert on(server) == {"temperature": 1.0}
    assert disable().empty


def test_settings_lost_at_reload_are_found(server, apply, disable, undo_dir):
    server.forget_on_reload = "dflash_draft_model"
    with pytest.raises(ValueError, match="dflash_draft_model: the server stored null"):
        apply()
    assert not server.stored.get("dflash_enabled")


@pytest.fixture
def silent(monkeypatch):
    """Make the answers to some requests get lost after the server has done what they ask."""

    def start(*requests):
        call, seen = Admin._call, []

        def lossy(self, method, path, body=None, seconds=0):
            answer = call(self, method, path, body, seconds)
            seen.append(method)
            if (method, seen.count(method)) in requests:
                with closing_server() as url:
                    call(Admin(url), method, path, body)
            return answer

        monkeypatch.setattr(Admin, "_call", lossy)

    return start


@pytest.mark.parametrize("lost", ["PUT", "POST"])
def test_a_lost_answer_takes_the_settings_back(server, apply, disable, silent, lost):
    silent((lost, 1))
    with pytest.raises(ValueError, match=r"no whole answer .*the settings are as before$"):
        apply()
    assert on(server) == {"temperature": 1.0}
    assert disable().empty


def test_settings_that_cannot_be_taken_back_can_be_disabled(
    server, apply, disable, undo_dir, silent
):
    server.forget_on_reload = "dflash_draft_model"
    silent(("PUT", 2))
    with pytest.raises(ValueError, match=r"are on the server .*could not be taken back") as error:
        apply()
    line = str(error.value)
    assert "\n" not in line and "as before" not in line and "the server stored null" in line
    command = line.partition("`mlx_dflash2.omlx ")[2].partition("`")[0].split()
    args = setup_arg_parser().parse_args(command)
    assert (args.command, args.running, args.write) == ("disable", True, True)
    assert (args.model, args.url) == (MODEL, server.url)
    server.stored |= settings()["models"][MODEL]
    disable()
    assert on(server) == {"temperature": 1.0}


def test_a_refused_change_is_not_taken_back(server, apply, undo_dir):
    server.model["dflash_compatible"] = None
    with pytest.raises(ValueError, match="HTTP 400: not compatible; the settings are as before"):
        apply()
    assert len(server.puts) == 1 and list(undo_dir.iterdir()) == []


def test_no_reload(server, apply, disable, undo_dir):
    apply(reload=False)
    assert "POST /admin/api/reload" not in server.calls


def test_the_server_names_the_model(server, admin, folder, tmp_path):
    listed = admin.models()
    assert server_id(listed, MODEL, folder) == MODEL
    # The folder decides, whatever name it has here.
    assert server_id(listed, "other-name", folder) == MODEL
    with pytest.raises(ValueError, match=f"allowed: a model of the server: {MODEL}"):
        server_id(listed, "other-name", tmp_path)
    with pytest.raises(ValueError, match=f"found '{MODEL}' in {tmp_path}"):
        server_id(listed, MODEL, tmp_path)
    with pytest.raises(ValueError, match="allowed: a model of the server"):
        server_id(listed, "other-name", None)
    # The paths of another machine cannot be seen from here.
    server.model["model_path"] = "/not/here"
    assert server_id(admin.models(), MODEL, folder) == MODEL
    server.model["dflash_compatible"] = False
    server.model["dflash_compatibility_reason"] = "unknown type"
    with pytest.raises(ValueError, match="the server refuses DFlash for it: unknown type"):
        server_id(admin.models(), MODEL, folder)


def test_traps_stored_on_the_server_are_refused(server, apply, disable, undo_dir):
    server.stored["dflash_max_ctx"] = 0
    with pytest.raises(ValueError, match="dflash_max_ctx: found 0"):
        apply()


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
    with pytest.raises(ValueError, match=r"no whole answer .*refused") as error:
        Admin(url).models()
    assert url in str(error.value)
    assert Admin(url).version() is None and not server_answers(url)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "file:///etc/passwd",
        "ftp://127.0.0.1",
        "http://",
        "http://host:99999",
        "http://a b",
        "http://host\r\nX: y",
        "",
    ],
)
def test_urls_that_are_refused(url):
    with pytest.raises(ValueError, match=r"url: found .*, allowed: such as http://127") as error:
        Admin(url)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="url: found"):
        server_answers(url)


@pytest.mark.parametrize("url", [f"http://{'a' * 70}:1", "http://127.0.0.1:9/ü"])
def test_urls_that_cannot_be_sent(url):
    with pytest.raises(ValueError, match="no whole answer") as error:
        Admin(url).models()
    assert url in str(error.value) and not server_answers(url)


def test_the_version_is_asked_without_a_key(server):
    server.version = "0.7.1rc2"
    assert Admin(server.url).version() == "0.7.1rc2"
    server.version = None
    assert Admin(server.url).version() is None


def test_a_connection_that_ends_without_an_answer():
    with closing_server() as url, pytest.raises(ValueError, match="no whole answer") as error:
        Admin(url).models()
    assert url in str(error.value) and "\n" not in str(error.value)


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"no whole answer \("):
            Admin(url, timeout=0.2).models()


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_breaks_off(status):
    with other_server(status, "{}", {"Content-Length": "9"}, keep_open=True) as url:
        with pytest.raises(ValueError, match=r"no whole answer \(not within 0\.2 s\)"):
            Admin(url, timeout=0.2).models()


@pytest.mark.parametrize(
    "status, body", [(200, "<html>"), (200, '{"models": 1}'), (200, '[{"name": "x"}]')]
)
def test_something_else_listens(status, body):
    with other_server(status, body, {}) as url, pytest.raises(ValueError, match="is this oMLX"):
        Admin(url).models()


def test_a_server_that_drips_is_not_waited_for():
    """A byte now and then keeps each read alive, but not the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection:
                for _ in range(50):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"no whole answer \(not within 0\.5 s\)"):
            Admin(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5).models()
        assert time.monotonic() - start < 3


def test_a_long_answer_is_cut():
    with other_server(200, "x" * (8 * 2**20 + 1), {}) as url:
        with pytest.raises(ValueError, match="cut off, or longer than 8 MB"):
            Admin(url).models()


def test_a_refusal_does_not_repeat_the_key():
    detail = [{"loc": ["body", "api_key"], "msg": "too short", "input": "sk-secret"}]
    with other_server(422, json.dumps({"detail": detail}), {}) as url:
        with pytest.raises(AdminError, match="too short") as error:
            Admin(url).login("sk-secret")
    assert "sk-secret" not in str(error.value)


def test_control_characters_of_a_server_do_not_reach_the_terminal():
    with other_server(400, json.dumps({"detail": "a\x1b[2J\nb"}), {}) as url:
        with pytest.raises(AdminError) as error:
            Admin(url).models()
    assert str(error.value).isprintable()


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_not_followed(status):
    seen = []
    with other_server(200, "{}", {}, seen) as elsewhere:
        headers = {"Location": elsewhere + "/admin/api/login"}
        with other_server(status, "", headers) as url, pytest.raises(AdminError) as error:
            Admin(url).login("sk-secret")
    assert error.value.status == status and seen == []
    assert f"it redirects to {elsewhere}" in str(error.value)


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


def test_undo_record_holds_no_key(server, apply, undo_dir):
    apply()
    (record,) = undo_dir.iterdir()
    assert "sk-secret" not in record.read_text()
    assert json.loads(record.read_text())["records"][0]["place"] == server.url
