"""Two tiny model folders, and a server that answers oMLX's admin routes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mlx.core as mx
from hypothesis import strategies as st

from mlx_dflash2.omlx import model_settings
from mlx_dflash2.omlx.settings import KEYS
from support.tiny import drafter_config

MODEL = "Qwen3.8-Tiny-4bit"
DRAFTER = "/models/z-lab/Qwen3.8-Tiny-DFlash2"

TARGET_CONFIG = {
    "model_type": "qwen3_5",
    "quantization": {"group_size": 64, "bits": 4},
    "text_config": {
        "hidden_size": 64,
        "vocab_size": 512,
        "num_hidden_layers": 8,
        "head_dim": 16,
    },
}
DRAFTER_CONFIG = drafter_config(target_layer_ids=[1, 4, 5, 6]) | {"num_target_layers": 8}


def settings(model: str = MODEL, drafter: str = DRAFTER, **kwargs: Any) -> dict[str, Any]:
    """The recommended document for an M4."""
    return model_settings(model, drafter, **{"chip": "M4", **kwargs})


def readme_example() -> dict[str, Any]:
    """The settings document that the documentation shows."""
    section = (
        (Path(__file__).parents[2] / "docs/omlx.md").read_text().partition("\n## The settings\n")[2]
    )
    return json.loads(section.partition("```json\n")[2].partition("```")[0])


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)  # fmt: skip
# Switches that oMLX refuses beside others, and numbers that it refuses by themselves.
_RISKY = {
    name: st.booleans()
    for name in (
        *("mtp_enabled", "vlm_mtp_enabled", "moe_expert_offload_enabled", "dflash_enabled"),
        *("specprefill_enabled", "turboquant_kv_enabled", "qwen35_oq_a8_enabled"),
    )
} | {
    "moe_expert_offload_resident_fraction": st.sampled_from([0.25, 1, 0, 2, True, "x", None]),
    "qwen35_oq_a8_min_tokens": st.sampled_from([128, 1, 0, None, "x"]),
}


@st.composite
def entries(draw, risky: bool = False):
    """An entry with foreign keys, and with DFlash keys of allowed values."""
    entry = draw(st.dictionaries(st.text(max_size=6), _VALUES, max_size=4))
    for name in draw(st.lists(st.sampled_from(list(KEYS)), unique=True, max_size=6)):
        kind, allowed, _, nullable = KEYS[name]
        choices = allowed if isinstance(allowed, tuple) else ()
        values = st.sampled_from(choices) if choices else st.integers(2, 99)
        values = st.just("/old/drafter") if kind is str and not choices else values
        entry[name] = draw(values | st.none() if nullable else values)
    if risky:
        chosen = draw(st.lists(st.sampled_from(list(_RISKY)), unique=True, max_size=5))
        entry |= {name: draw(_RISKY[name]) for name in chosen}
    return dict(draw(st.permutations(list(entry.items()))))


@st.composite
def documents(draw, risky: bool = False):
    """A settings document in random order and layout, the target in it or not."""
    ids = st.sampled_from([MODEL, "b", "Org--Name", "ü/🙂", ""]) | st.text(max_size=5)
    models = draw(st.dictionaries(ids, entries(risky), max_size=4))
    top = draw(st.dictionaries(st.text(max_size=4), _VALUES, max_size=2))
    items = list((top | {"version": 1, "models": models}).items())
    indent = draw(st.sampled_from([None, 0, 1, 2, "\t"]))
    return json.dumps(dict(draw(st.permutations(items))), indent=indent)


def make_folder(folder: Path, config: dict, weights: tuple[str, ...] = ("fc.weight",)) -> Path:
    """A model folder with a config and one weight file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.zeros((2, 2)) for name in weights}
    )
    return folder


def make_base(root: Path, text: str | None = None) -> Path:
    """A base directory with a target and a drafter, and perhaps a settings file."""
    base = root / "base"
    make_folder(base / "models" / "mlx-community" / MODEL, TARGET_CONFIG)
    make_folder(base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2", DRAFTER_CONFIG)
    if text is not None:
        (base / "model_settings.json").write_text(text, encoding="utf-8")
    return base


class FakeServer:
    """oMLX's admin interface, for what a real server cannot be made to do."""

    def __init__(self, folder: Path, key: str | None = "sk-secret", knows_block: bool = True):
        self.key, self.knows_block = key, knows_block
        self.stored: dict[str, Any] = {"temperature": 1.0}
        self.model: dict[str, Any] = {
            "id": MODEL,
            "model_path": str(folder),
            "dflash_compatible": True,
            "dflash_compatibility_reason": "",
        }
        self.calls: list[str] = []
        self.puts: list[dict[str, Any]] = []
        self.forget_on_reload: str | None = None
        self.version: str | None = "0.7.0"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        size = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(size)) if size else {}
        self.calls.append(f"{request.command} {unquote(request.path)}")
        cookie = "omlx_admin_session=good" in (request.headers.get("Cookie") or "")
        headers = {}
        if request.path == "/openapi.json":
            title = "oMLX API" if self.version else "Another"
            status, reply = 200, {"info": {"title": title, "version": self.version}}
        elif request.path == "/admin/api/login":
            status, reply = self._login(body)
            if status == 200:
                headers["Set-Cookie"] = "omlx_admin_session=good; HttpOnly; SameSite=lax"
        elif self.key is not None and not cookie:
            status, reply = 401, {"detail": "Not authenticated"}
        else:
            status, reply = self._route(request.command, unquote(request.path), body)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(json.dumps(reply).encode())

    def _login(self, body: dict) -> tuple[int, dict]:
        if self.key is None:
            return 400, {"detail": "No API key configured."}
        if body.get("api_key") != self.key:
            return 401, {"detail": "Invalid API key"}
        return 200, {"success": True}

    def _route(self, method: str, path: str, body: dict) -> tuple[int, dict]:
        if (method, path) == ("GET", "/admin/api/models"):
            shown = {"mtp_enabled": False, "dflash_enabled": False, "dflash_draft_model": None}
            return 200, {"models": [self.model | {"settings": shown | self.stored}]}
        if (method, path) == ("POST", "/admin/api/reload"):
            self.stored.pop(self.forget_on_reload, None)
            return 200, {"status": "ok"}
        if (method, path) != ("PUT", f"/admin/api/models/{MODEL}/settings"):
            return 404, {"detail": f"Model not found: {path}"}
        self.puts.append(body)
        if body.get("dflash_enabled") and not self.model["dflash_compatible"]:
            return 400, {"detail": "not compatible"}
        merged = self.stored | body
        if merged.get("dflash_enabled") and merged.get("mtp_enabled"):
            return 400, {"detail": "mtp_enabled and dflash_enabled cannot both be True"}
        if not self.knows_block:
            merged.pop("dflash_block_size", None)
        self.stored = {key: value for key, value in merged.items() if value is not None}
        return 200, {"success": True, "settings": self.stored, "requires_reload": False}
