"""Prompt caches on disk: whole or not there, bounded, and right after a restart."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache
from support.saved_models import save_drafter, save_target
from support.serving import Served, chat
from support.tiny import DENSE, HYBRID, SLIDING, drafter_config, make_drafter, make_model

from mlx_dflash2.decode.session import target_fingerprint
from mlx_dflash2.server import spill
from mlx_dflash2.server.spill import PromptFolder
from mlx_dflash2.server.store import PromptStore

BIG = 10**9


@pytest.fixture(params=[DENSE, HYBRID, SLIDING])
def pair(request, tmp_path):
    save_target(tmp_path / "pair" / "target", request.param)
    save_drafter(tmp_path / "pair" / "drafter", drafter_config(block_size=4))
    return tmp_path / "pair"


def serve(pair, folder, *args):
    return Served(pair, "--prompt-cache-dir", folder, *args)


def files_of(folder):
    return sorted(folder.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime)


def test_a_restart_goes_on_from_the_files(pair, tmp_path):
    folder, body = tmp_path / "caches", chat("a few words to begin with", max_tokens=12)
    with serve(pair, folder) as server:
        first = server.ask(body)
    assert files_of(folder)
    with serve(pair, folder) as server:
        again = server.ask(body)
        assert again["choices"] == first["choices"]
        assert again["timings"]["prompt_n"] == 1
        turn = [*body["messages"], first["choices"][0]["message"], chat("more")["messages"][0]]
        second = server.ask({"messages": turn, "max_tokens": 8})
        assert second["timings"]["cache_n"] >= first["usage"]["prompt_tokens"] - 1
    with Served(pair) as server:
        assert server.ask({"messages": turn, "max_tokens": 8})["choices"] == second["choices"]


def test_the_drafter_s_context_comes_back_too(pair, tmp_path):
    folder, body = tmp_path / "caches", chat("a few words to begin with", max_tokens=12)
    with serve(pair, folder) as server:
        server.ask(body)
    with serve(pair, folder) as server:
        prompt = server.provider.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True
        )
        store: PromptStore = server.service.generator.store
        session, count = store.fetch(prompt)
        assert count == len(prompt) - 1 == session.context.offset == len(session)


def test_files_are_mlx_lm_s(pair, tmp_path):
    with serve(pair, tmp_path / "caches") as server:
        server.ask(chat("hello", max_tokens=9))
    model, _ = mlx_lm.load(str(pair / "target"))
    file = files_of(tmp_path / "caches")[-1]
    caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    tokens = json.loads(metadata["mlx_dflash2"])["tokens"]
    fresh = make_prompt_cache(model)
    model(mx.array([tokens]), cache=fresh)
    ours, theirs = (model(mx.array([[3, 4]]), cache=cache) for cache in (caches, fresh))
    assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


def folder_of(path, max_bytes=BIG, kind=DENSE):
    return PromptFolder(path, max_bytes, make_model(kind), make_drafter())


def filled(model, tokens):
    cache = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def fill(folder, *prompts):
    for tokens in prompts:
        context = folder.draft_model.make_context()
        folder.write(tokens, filled(folder.model, tokens), context)
        folder.flush()


def test_a_longer_conversation_takes_the_place_of_its_beginning(tmp_path):
    folder = folder_of(tmp_path)
    fill(folder, [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9])
    assert [file.tokens for file in folder.files] == [[1, 2, 3, 4, 5], [1, 2, 9]]
    assert len(files_of(tmp_path)) == 2
    folder.close()
    # What cannot be cut is kept beside it.
    folder = folder_of(tmp_path, kind=HYBRID)
    fill(folder, [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3])
    assert [file.tokens for file in folder.files] == [[1, 2, 3, 4, 5], [1, 2, 3]]
    folder.close()


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_the_file_that_spares_most(kind, tmp_path):
    folder = folder_of(tmp_path, kind=kind)
    fill(folder, [1, 2, 3], [1, 2, 8, 8, 8], [7] * 9)
    cases = {(1, 2, 3, 4): 3, (1, 2, 8, 9): 3, (1, 2, 3): 2, (4, 4): 0, (7,): 0, (7, 7, 7): 2}
    if kind == HYBRID:
        # Only whole entries.
        cases |= {(1, 2, 8, 9): 0, (1, 2, 3): 0, (7, 7, 7): 0}
    for prompt, count in cases.items():
        found = folder.find(list(prompt), more_than=0)
        assert (0 if found is None else len(found)) == count, prompt
        assert folder.find(list(prompt), more_than=count) is None
    folder.close()


def test_files_are_bounded(tmp_path):
    """The one that was used longest ago goes first, also over a restart."""
    folder = folder_of(tmp_path)
    fill(folder, [1] * 9)
    size = folder.nbytes
    folder.close()
    folder = folder_of(tmp_path, int(3.5 * size))
    fill(folder, [2] * 9, [3] * 9)
    assert folder.find([1] * 9, more_than=0) is not None
    fill(folder, [4] * 9)
    assert [file.tokens[0] for file in folder.files] == [3, 1, 4]
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 3.5 * size
    folder.close()
    folder = folder_of(tmp_path, int(1.5 * size))
    assert len(folder.files) == len(files_of(tmp_path)) == 1
    folder.close()
    # An entry that is larger than everything together is not kept.
    folder = folder_of(tmp_path, size // 2)
    fill(folder, [5] * 9)
    assert folder.files == files_of(tmp_path) == []
    folder.close()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


BREAKS = {
    "flipped": flip,
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "no cache": lambda path: mx.save_safetensors(str(path), {"a": mx.zeros(3)}),
    "a text": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("restart", [True, False])
def test_a_broken_file_is_left_out_with_a_line(name, restart, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    folder = folder_of(tmp_path)
    fill(folder, [1] * 9, [2] * 9)
    broken, good = files_of(tmp_path)
    if restart:
        folder.close()
    BREAKS[name](broken)
    if restart:
        folder = folder_of(tmp_path)
    assert folder.find([1] * 9, more_than=0) is None
    assert len(folder.find([2] * 9, more_than=0)) == 8
    assert files_of(tmp_path) == [good]
    (record,) = caplog.records
    assert broken.name in record.message and "is broken and left out" in record.message
    folder.close()


def test_other_targets_have_folders_of_their_own(tmp_path):
    """The same config with other weights, or another drafter's context, is not mixed up."""
    one, two = make_model(DENSE), make_model(DENSE, seed=1)
    assert (
        target_fingerprint(one) == target_fingerprint(make_model(DENSE)) != target_fingerprint(two)
    )
    assert target_fingerprint(make_model(DENSE, bits=4)) != target_fingerprint(one)
    folder = PromptFolder(tmp_path, BIG, one, make_drafter())
    context = folder.draft_model.make_context()
    assert folder.folder.name == target_fingerprint(one)[:32] and context.offset == 0
    fill(folder, [1] * 9)
    other = PromptFolder(tmp_path, BIG, two, make_drafter())
    assert other.find([1] * 9, more_than=0) is None
    folder.close()
    other.close()


def test_one_server_at_a_time(tmp_path):
    folder = folder_of(tmp_path)
    with pytest.raises(ValueError, match=r"^Another server uses the prompt caches in [^\n]*$"):
        folder_of(tmp_path)
    folder.close()
    folder_of(tmp_path).close()


def test_a_disk_that_is_full(tmp_path, monkeypatch, caplog):
    """It costs the files and nothing else."""
    folder = folder_of(tmp_path)

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill.os, "replace", replace)
    fill(folder, [1] * 9)
    assert "could not be written" in caplog.text and "No space" in caplog.text
    assert folder.files == []
    monkeypatch.undo()
    fill(folder, [1] * 9)
    assert len(folder.files) == 1
    folder.close()


def test_a_process_that_is_killed_while_it_writes(tmp_path):
    """What is there afterwards is whole, and what was begun is cleared away."""
    save_target(tmp_path / "target")
    save_drafter(tmp_path / "drafter", drafter_config(block_size=4))
    script = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from tests.server.test_spill import *\n"
        f"folder = folder_of({str(tmp_path / 'caches')!r})\n"
        "print('ready', flush=True)\n"
        "for i in range(10**6): fill(folder, [i % 500, i // 500] * 200)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root}/tests"}
    for wait in (0.05, 0.2, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=environment,
        )
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while not files_of(tmp_path / "caches") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
        folder = folder_of(tmp_path / "caches")
        assert list(folder._staging.iterdir()) == []
        assert len(folder.files) == len(files_of(tmp_path / "caches")) >= 1
        for file in folder.files[-5:]:
            assert len(folder.find(file.tokens, more_than=0)) == len(file.tokens) - 1
        folder.close()
        shutil.rmtree(tmp_path / "caches")
