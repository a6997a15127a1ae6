"""`--dense`: the pair in float32, after a word about memory, on the CPU alone."""

import importlib
import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from support.saved_models import save_target
from support.tiny import DENSE, make_model

from mlx_dflash2.checkpoint.dense import make_dense
from mlx_dflash2.cli import dense
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
        models.append((model, draft_model))
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
