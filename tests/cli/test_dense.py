"""`--dense`: the pair in float32, after a word about memory, on the CPU alone."""

import importlib
import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from support.commands import main_of
from support.drafters import V1
from support.saved_models import save_drafter, save_target
from support.tiny import DENSE, make_model

from mlx_dflash2 import load_drafter
from mlx_dflash2.benchmark import command as benchmark
from mlx_dflash2.checkpoint.dense import make_dense
from mlx_dflash2.checkpoint.save import save_drafter as write_drafter
from mlx_dflash2.cli import dense
from mlx_dflash2.copies import without_copies
from mlx_dflash2.doctor import command as doctor
from mlx_dflash2.train.inputs import Inputs
from mlx_dflash2.train.options import parse

generate = importlib.import_module("mlx_dflash2.generate.command")


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory):
    """A target in 4 bits with scales of 16."""
    folder = save_target(tmp_path_factory.mktemp("quantized") / "target")
    model = make_model(DENSE, mx.bfloat16, bits=4)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def answer(monkeypatch, invoke, quantized_folder):
    """Answers a prompt; status, stdout, stderr, and the models that answered."""
    models, stream = [], generate.stream_text

    def seen(model, tokenizer, prompt, draft_model, *args, **options):
        models.append((model, without_copies(draft_model)))
        return stream(model, tokenizer, prompt, draft_model, *args, **options)

    monkeypatch.setattr(generate, "stream_text", seen)

    def answer(*args):
        return *invoke("--model", str(quantized_folder), "-p", "hello", "-m", "9", *args), models

    return answer


def test_both_models_are_dense_and_the_tokens_plain_mlx_lm_s(answer, quantized_folder):
    status, out, err, models = answer("--dense")
    assert status == 0, err
    line = next(line for line in err.splitlines() if line.startswith("--dense: "))
    assert "GB of float32 weights instead of" in line and "of memory are available" in line
    model, drafter = models[0]
    for found in (model, drafter):
        assert {value.dtype for _, value in tree_flatten(found.parameters())} == {mx.float32}
    expected, tokenizer = mlx_lm.load(str(quantized_folder))
    make_dense(expected)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert out == mlx_lm.generate(expected, tokenizer, prompt, max_tokens=9) + "\n"


def test_without_the_flag_nothing_is_unpacked(answer):
    status, _, err, models = answer()
    assert status == 0 and "--dense" not in err
    assert any(isinstance(m, nn.QuantizedLinear) for m in models[0][0].modules())


def test_what_does_not_fit_is_refused_before_it_is_read(answer, monkeypatch):
    evaluated = []
    monkeypatch.setattr(dense, "available_memory", lambda: 1000)
    monkeypatch.setattr(dense, "make_dense", lambda model: evaluated.append(model))
    status, out, err, models = answer("--dense")
    assert status == 1 and not out and not models and not evaluated
    error = err.splitlines()[-1]
    assert error.startswith("error: --dense needs 0.00 GB of float32 weights instead of 0.00 GB")
    assert error.endswith("0.00 GB of memory are available; leave it out.")


@pytest.mark.parametrize("flag", [["--draft-bits", "4"], ["--quantize-activations"]])
def test_flags_that_it_undoes_are_refused(answer, flag):
    status, _, err, _ = answer("--dense", *flag)
    assert status == 1 and f"error: {flag[0]} has no effect with --dense" in err


def test_it_is_refused_on_a_gpu(answer, monkeypatch):
    monkeypatch.setattr(dense.mx, "default_device", lambda: mx.gpu)
    status, _, err, _ = answer("--dense")
    assert status == 1 and "error: --dense has an effect only on MLX's CPU backend" in err


def test_training_on_a_dense_target(quantized_folder, tmp_path, capsys):
    options = ["--model", str(quantized_folder), "--output-path", str(tmp_path), "--dequantize"]
    model, _ = Inputs(parse(options)).loaded
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}
    assert capsys.readouterr().err.startswith("--dequantize: 0.00 GB of float32 weights")


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """A DFlash 1 drafter in 4 bits."""
    folder, config = tmp_path_factory.mktemp("older"), V1 | {"block_size": 4}
    drafter = load_drafter(save_drafter(folder / "full", config), bits=4, group_size=32)
    write_drafter(drafter, folder / "packed", config, "")
    return folder / "packed"


def run(invoke, command, *arguments):
    return invoke(*map(str, arguments), main=main_of(command.__name__.split(".")[1]))


def test_all_models_of_a_benchmark_are_dense(
    quantized_folder, older, tmp_path, invoke, monkeypatch
):
    pair, benches = save_drafter(tmp_path / "drafter"), []
    (tmp_path / "one.jsonl").write_text('"w7 w8"\n')
    monkeypatch.setattr(benchmark, "_run", lambda bench, *_: (benches.append(bench), False))
    monkeypatch.setattr(benchmark, "report", lambda _: [])
    status, _, err = run(
        invoke, benchmark, "--model", quantized_folder, "--draft-model", pair,
        "--dflash1-model", older, "--draft-lm", quantized_folder,
        "--suites", tmp_path / "one.jsonl", "--dense", "-m", "9",
    )  # fmt: skip
    assert status == 0, err
    for flag in ("--dense", "--dense, --dflash1-model", "--dense, --draft-lm"):
        assert any(line.startswith(f"{flag}: ") for line in err.splitlines())
    (bench,) = benches
    assert list(bench.drafters) == ["DFlash 2", "DFlash 1"]
    others = [arm.draft_lm for arm in bench.arms if arm.draft_lm is not None]
    assert others
    for model in (*bench.drafters.values(), *others):
        assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}


def test_a_trace_of_a_dense_pair(quantized_folder, older, invoke, monkeypatch):
    pairs = []

    def seen(model, drafter, *_):
        pairs.append((model, drafter))
        raise ValueError("seen")

    monkeypatch.setattr(doctor, "bisect", seen)
    pair = ["--model", quantized_folder, "--draft-model", older, "--dense", "-m", "9"]
    status, _, err = run(invoke, doctor, *pair, "--trace")
    assert status == 1 and "--dense: " in err and err.endswith("error: seen\n")
    for found in pairs[0]:
        assert {value.dtype for _, value in tree_flatten(found.parameters())} == {mx.float32}
    status, _, err = run(invoke, doctor, *pair[:-2])
    assert status == 1 and err == "error: --dense has an effect only with --trace.\n"
