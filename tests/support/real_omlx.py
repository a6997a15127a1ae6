"""The server of flyto-mlx, a fork of oMLX, in an environment of its own on MLX's CPU backend."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mlx_dflash2.omlx.server import Admin

KEY = "sk-real"
_NO_DEPS = ("flyto-mlx==0.7.0", "mlx-embeddings==0.1.0", "mlx-vlm==0.6.3", "dflash-mlx")
# What `omlx serve` imports; its other dependencies bring torch, or have no wheel for Linux.
_DEPS = (
    *("mlx[cpu]==0.32.3", "mlx-lm==0.31.3", "transformers>=5.12.1,<5.13", "fastapi", "uvicorn"),
    *("python-multipart", "itsdangerous", "jinja2", "psutil", "requests", "tabulate", "regex"),
    *("jsonschema", "tiktoken", "protobuf", "sentencepiece", "Pillow", "openai-harmony"),
    *("mistral-common", "httpx", "socksio"),
)
# What oMLX 0.7 has and the fork has not: some keys, and three rules.
_NEW_KEYS = (
    *("dflash_block_size", "dflash_verify_mode", "moe_expert_offload_enabled"),
    *("moe_expert_offload_resident_fraction", "qwen35_oq_a8_enabled", "qwen35_oq_a8_min_tokens"),
)
_FIELDS = "".join(f"    {name}: Any = None\n" for name in _NEW_KEYS)
_RULES = """\
        share = self.moe_expert_offload_resident_fraction
        if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
            raise ValueError("moe_expert_offload_resident_fraction is out of range")
        if self.moe_expert_offload_enabled and (
            self.dflash_enabled or self.mtp_enabled or self.vlm_mtp_enabled
        ):
            raise ValueError("MoE expert offload cannot be combined")
        if self.qwen35_oq_a8_enabled and not self.qwen35_oq_a8_min_tokens >= 1:
            raise ValueError("qwen35_oq_a8_min_tokens is out of range")
"""
_SHOWN = "".join(f'                "{name}": settings.{name},\n' for name in _NEW_KEYS)
_HANDLER = (
    f"    for _name in {_NEW_KEYS}:\n"
    "        if _name in sent:\n"
    "            setattr(current_settings, _name, getattr(request, _name))\n"
)


def install(folder: Path) -> Path:
    """Make the environment once, and return its Python; skips where it cannot be had."""
    python, done = folder / "bin" / "python", folder / "complete"
    pip = [str(python), "-m", "pip", "install", "-q"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands += [[*pip, "--no-deps", *_NO_DEPS], [*pip, *_DEPS]]
    for command in [] if done.exists() else commands:
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            pytest.skip(f"flyto-mlx cannot be installed here: {ended.stderr.strip()[-300:]}")
    done.touch()
    return python


def package(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python3*/site-packages/omlx"))


def newer(python: Path, folder: Path) -> Path:
    """A copy of the package with what oMLX 0.7 has and the fork has not."""
    copy = folder / "omlx"
    shutil.copytree(package(python), copy, ignore=shutil.ignore_patterns("__pycache__"))
    # The class has a default where a request has none.
    fields = _FIELDS.replace("min_tokens: Any = None", "min_tokens: Any = 128")
    _insert(copy / "model_settings.py", "    dflash_draft_model: Optional", fields)
    _insert(copy / "model_settings.py", "    def __post_init__", _RULES)
    _insert(copy / "admin" / "routes.py", "    dflash_draft_model: str | None", _FIELDS)
    _insert(copy / "admin" / "routes.py", '                "dflash_draft_model": ', _SHOWN)
    _insert(
        copy / "admin" / "routes.py", '    if "dflash_draft_model" in sent:', _HANDLER, before=True
    )
    return folder


def _insert(path: Path, anchor: str, text: str, before: bool = False) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = (i for i, line in enumerate(lines) if line.startswith(anchor))
    lines.insert(at if before else at + 1, text)
    path.write_text("".join(lines), encoding="utf-8")


def settings_module(site: Path) -> Any:
    """The module of the settings classes, without the server that its package imports."""
    name = f"settings_of_{abs(hash(str(site)))}"
    package = types.ModuleType(name)
    package.__path__ = [str(site / "omlx")]
    sys.modules[name] = package
    spec = importlib.util.spec_from_file_location(
        f"{name}.model_settings", site / "omlx" / "model_settings.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class RealServer:
    """`omlx serve` on a free port; ``site`` holds the package that is run."""

    def __init__(self, python: Path, site: Path, base: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.base = f"http://127.0.0.1:{self.port}", base
        words = ("serve", "--base-path", str(base), "--port", str(self.port), "--api-key", KEY)
        self._command = [str(python), "-c", "from omlx.cli import main; main()", *words]
        self._environment = {**os.environ, "PYTHONPATH": str(site)}

    def __enter__(self) -> "RealServer":
        self._output = open(self.base / "output.log", "w")
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._output, stderr=self._output
        )
        for _ in range(240):
            if self._process.poll() is not None:
                pytest.fail((self.base / "output.log").read_text()[-2000:])
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return self
            except OSError:
                time.sleep(0.5)
        pytest.fail("the server does not answer within two minutes")

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._output.close()

    def chat(self, model: str, stream: bool = False) -> str:
        """The answer to a short request, once the log has it too."""
        logged = self.log.read_text().count("Chat completion:")
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body | {"stream": stream}).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
        for _ in range(100):
            if self.log.read_text().count("Chat completion:") > logged:
                break
            time.sleep(0.1)
        return text

    @property
    def log(self) -> Path:
        return self.base / "logs" / "server.log"


def call(server: RealServer, method: str, path: str) -> None:
    """An admin request of our own, logged in."""
    admin = Admin(server.url)
    admin.login(KEY)
    admin._call(method, path, None, 60.0)
