"""Drafters written in MLX format: what is read back is what was there, or nothing is written."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.commands import main_of, options_of
from support.drafters import FULL, SLIDING, SPECULATORS, V1, V2, nested, without
from support.golden import CASES, GOLDEN, HeadTarget, rounds
from support.saved_models import save_drafter as write_drafter

from mlx_dflash2 import load_drafter
from mlx_dflash2.checkpoint import save as export
from mlx_dflash2.checkpoint.files import read_header
from mlx_dflash2.checkpoint.load import DTYPES
from mlx_dflash2.checkpoint.quantization import CODEBOOKS, Quantization
from mlx_dflash2.checkpoint.save import config_of, save_drafter
from mlx_dflash2.checkpoint.tensors import QUANTIZED_AT_LOAD
from mlx_dflash2.convert import command
from mlx_dflash2.drafter.args import DrafterArgs

main = main_of("convert")

DFLASH2 = [case for case in CASES if case.startswith("dflash2")]
BARE = {f"candidate_selector.{name}" for name in CODEBOOKS}


def parameters(drafter) -> dict[str, mx.array]:
    return dict(tree_flatten(drafter.parameters()))


def same(first, second) -> bool:
    """Whether two drafters have the same tensors, bit for bit."""
    first, second = parameters(first), parameters(second)
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and mx.array_equal(first[name], second[name])
        for name in first
    )


def drafts(case: str, drafter) -> list[list[int]]:
    """The drafts of every round of a golden case."""
    target, context, position, found = HeadTarget(case), drafter.make_context(), 0, []
    for golden in rounds(case):
        taps = mx.array(golden["taps"])
        drafter.extend(context, mx.zeros(taps.shape[1]), taps, position)
        position += taps.shape[1]
        anchor = mx.array([int(golden["anchor"])])
        proposal = drafter.propose(target, anchor, context, int(golden["block"]))
        found.append(proposal.tokens.tolist())
    return found


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


# --- configs

ROPES = {
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    "llama3": dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=512)
    | dict(low_freq_factor=1.0, high_freq_factor=4.0),
    "linear": dict(rope_type="linear", factor=2.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "longrope": dict(rope_type="longrope", original_max_position_embeddings=512)
    | dict(short_factor=[1.0] * 16, long_factor=[2.0] * 16),
}
CONFIGS = {case: config_in(GOLDEN / case) for case in CASES}
CONFIGS |= {
    f"rope {k}": V2 | {"rope_parameters": v | {"rope_theta": 5e5}} for k, v in ROPES.items()
}
CONFIGS |= {
    "speculators": SPECULATORS,
    "ropes by kind": V2
    | dict(layer_types=[FULL, SLIDING])
    | {
        "rope_parameters": {FULL: ROPES["yarn"] | {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}
    },
    "legacy causal": without(V2, "is_causal") | dict(layer_types=[SLIDING, FULL]),
    "causal mixed layers": V2 | dict(layer_types=[SLIDING, FULL], is_causal=True),
    "use_swa": without(V2, "layer_types", "is_causal") | dict(use_swa=True),
    "pairs adjacent": V2 | dict(rope_is_neox_style=False),
    "no depth": V2 | dict(num_target_layers=None),
    "wider target": V2 | dict(target_hidden_size=96),
    "transforms": nested(
        output_multiplier=0.25, final_logit_softcapping=30.0, input_embedding_scale=8.0
    ),
    "small selector": nested(selector_vocab_size=300),
    "no convolution": nested(conv_kernel_size=0),
    "DFlash 1": V1 | dict(input_embedding_scale=2.0, final_logit_softcapping=15.0),
    "muse": V1 | dict(architectures=["MuseGlimmerAssistantModel"]),
    "quantized": V2 | dict(quantization={"bits": 4, "group_size": 32, "fc": False}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_reads_back_equal(name):
    args = DrafterArgs.from_dict(CONFIGS[name])
    config = json.loads(json.dumps(config_of(args)))
    assert DrafterArgs.from_dict(config) == args
    assert config_of(DrafterArgs.from_dict(config)) == config


@pytest.mark.parametrize(
    "field, changes",
    [
        ("causal", dict(causal=[True, False])),
        ("causal", dict(causal=[False, True], layer_types=[SLIDING, FULL])),
        ("rope_parameters", dict(rope_parameters=[{"rope_theta": 1e4}, {"rope_theta": 1e5}])),
        ("selector_rank", dict(selector_rank=0)),
        ("selector_rank", dict(generation=1)),
        ("num_target_layers", dict(num_target_layers=6, num_target_layers_declared=False)),
        ("sliding_window", dict(layer_types=[FULL, FULL])),
        ("final_logit_softcapping", dict(final_logit_softcapping=-1.0)),
        ("architectures", dict(generation=3)),
    ],
)
def test_config_of_names_what_it_cannot_say(field, changes):
    args = replace(DrafterArgs.from_dict(V2), **changes)
    with pytest.raises(ValueError, match=f"^Drafter config: `{field}` is ") as error:
        config_of(args)
    assert "\n" not in str(error.value)


# --- unquantized


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_drafter_drafts_the_same_after_its_conversion(case, dtype, tmp_path):
    command.convert(str(GOLDEN / case), tmp_path / "out", dtype=dtype)
    expected, found = (
        load_drafter(GOLDEN / case, dtype=DTYPES[dtype]),
        load_drafter(tmp_path / "out"),
    )
    assert found.args == expected.args and same(found, expected)
    assert drafts(case, found) == drafts(case, expected)
    written = config_in(tmp_path / "out")
    assert written.pop("dtype") == dtype and written == CONFIGS[case]


def test_the_files_of_a_drafter(tmp_path):
    source = write_drafter(tmp_path / "source", SPECULATORS)
    command.convert(str(source), tmp_path / "a" / "out")
    out = tmp_path / "a" / "out"
    assert {file.name for file in out.iterdir()} == {
        *("config.json", "model.safetensors", "README.md")
    }
    assert list(out.parent.iterdir()) == [out]
    tensors, metadata = mx.load(str(out / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert BARE <= tensors.keys() and not any("codebook.weight" in name for name in tensors)
    assert config_in(out)["architectures"] == ["DFlash2DraftModel"]
    card = (out / "README.md").read_text()
    assert "from `source`" in card and "--draft-model out" in card and "all bfloat16" in card
    assert str(tmp_path) not in card and "base_model" not in card


def test_a_trained_drafters_card_says_what_its_weights_are_now(tmp_path):
    source = write_drafter(tmp_path / "source")
    head = "# Mine\n\n| | |\n| --- | --- |\n| Layers | 2 |\n"
    tail = "\n| Weights | of no table |\n"
    (source / "README.md").write_text(head + "| Weights | all bfloat16 |\n" + tail)
    command.convert(str(source), tmp_path / "out", quantization=Quantization(4, 32))
    card = (tmp_path / "out" / "README.md").read_text()
    assert card == head + "| Weights | 4 bits in groups of 32, the rest bfloat16 |\n" + tail


def test_the_sources_card_is_kept(tmp_path):
    source = write_drafter(tmp_path / "source")
    (source / "README.md").write_text("A card – as it was.\n", encoding="utf-8")
    command.convert(str(source), tmp_path / "out", Quantization(group_size=32))
    assert (tmp_path / "out" / "README.md").read_bytes() == (source / "README.md").read_bytes()


def test_large_drafters_are_split(tmp_path, monkeypatch):
    def two(weights):
        names = list(weights)
        return [{n: weights[n] for n in part} for part in (names[:5], names[5:])]

    monkeypatch.setattr(export, "make_shards", two)
    source = write_drafter(tmp_path / "source")
    command.convert(str(source), tmp_path / "out", dtype="float32")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file in files:
        for name in read_header(tmp_path / "out" / file):
            assert index["weight_map"].pop(name) == file
    assert not index["weight_map"]
    assert same(load_drafter(tmp_path / "out"), load_drafter(source))


# --- quantized


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bits, codebook_bits", [(4, None), (8, 3), (2, 5), (6, 8)])
def test_quantized_is_as_in_memory(case, bits, codebook_bits, tmp_path):
    command.convert(str(GOLDEN / case), tmp_path / "out", Quantization(bits, 32, codebook_bits))
    expected = load_drafter(GOLDEN / case, dtype=mx.bfloat16)

    def scheme(path, module):
        name = path.rpartition(".")[2]
        if name in CODEBOOKS and module.weight.shape[-1] % 32 == 0:
            return {"bits": codebook_bits or bits, "group_size": 32}
        return name in QUANTIZED_AT_LOAD and {"bits": bits, "group_size": 32}

    nn.quantize(expected, class_predicate=scheme)
    found = load_drafter(tmp_path / "out")
    assert same(found, expected) and drafts(case, found) == drafts(case, expected)
    config = config_in(tmp_path / "out")
    assert config["quantization"] == config["quantization_config"]
    plain = without(config, "quantization", "quantization_config", "dtype")
    assert plain == CONFIGS[case]


def test_quantized_at_load_or_before_is_the_same(tmp_path):
    source = write_drafter(tmp_path / "source")
    command.convert(str(source), tmp_path / "out", Quantization(8, 64))
    large = parameters(load_drafter(source, bits=8, dtype=mx.bfloat16))
    found = parameters(load_drafter(tmp_path / "out"))
    # Rank 32 does not take groups of 64.
    assert large.keys() == found.keys()
    assert all(mx.array_equal(found[name], large[name]) for name in large)


def test_what_differs_is_stated_by_path_and_reported_once(invoke, tmp_path):
    source = write_drafter(tmp_path / "source", nested(selector_rank=128))
    out = tmp_path / "out"
    args = ["--model", f"{source}", "--mlx-path", f"{out}", "-q"]
    args += ["--q-group-size", "128", "--q-codebook-bits", "8"]
    status, text, err = invoke(*args, main=main)
    assert (status, err) == (0, "Loading\nQuantizing\n")
    section = config_in(out)["quantization"]
    scheme = {"group_size": 128, "bits": 4, "mode": "affine"}
    projections = [f"self_attn.{n}_proj" for n in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    projections += [f"{n}_conv.kernel_projection" for n in ("attention", "mlp")]
    left = {f"layers.{i}.{name}": False for i in range(2) for name in projections}
    left["candidate_selector.hidden_projection"] = False
    assert section == scheme | left | dict.fromkeys(BARE, scheme | {"bits": 8})
    wrote, undivided, always = text.splitlines()
    assert wrote.startswith(f"Wrote {out}: ") and "4 bits in groups of 128" in wrote
    assert undivided.endswith("rows: 2 q_proj, 2 k_proj, 2 v_proj, 2 gate_proj, 2 up_proj.")
    assert always.endswith("1 hidden_projection, 4 kernel_projection, norms, base_kernel.")
    weights = mx.load(str(out / "model.safetensors"))
    assert {f"{path}.{kind}" for path in BARE for kind in ("weight", "scales", "biases")} <= set(
        weights
    )
    numbers = sum(value.size for value in parameters(load_drafter(source)).values())
    bits = sum(value.nbytes for value in weights.values()) * 8 / numbers
    assert f" {bits:.3f} bits per weight" in wrote


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_numbers_are_rounded_once(dtype, tmp_path):
    source = write_drafter(tmp_path / "source")
    command.convert(str(source), tmp_path / "packed", Quantization(5, 32, 8))
    command.convert(str(tmp_path / "packed"), tmp_path / "out", dequantize=True, dtype=dtype)
    found, packed = load_drafter(tmp_path / "out"), load_drafter(tmp_path / "packed")
    assert "quantization" not in config_in(tmp_path / "out") and found.args.quantization is None
    modules = dict(packed.named_modules())
    for name, value in parameters(found).items():
        module = modules[name.rpartition(".")[0]]
        expected = module[name.rpartition(".")[2]]
        if "scales" in module:
            scales, biases = (x.astype(mx.float32) for x in (module.scales, module.biases))
            expected = mx.dequantize(module.weight, scales, biases, 32, module.bits)
        assert value.dtype == DTYPES[dtype]
        assert mx.array_equal(value, expected.astype(value.dtype)), name
    assert BARE <= mx.load(str(tmp_path / "out" / "model.safetensors")).keys()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_other_modes_are_saved_and_dequantized(mode, tmp_path):
    drafter = load_drafter(write_drafter(tmp_path / "source"))
    nn.quantize(drafter, mode=mode)
    save_drafter(drafter, tmp_path / "packed", config_of(drafter.args), "card")
    assert same(load_drafter(tmp_path / "packed"), drafter)
    command.convert(str(tmp_path / "packed"), tmp_path / "out", dequantize=True)
    assert load_drafter(tmp_path / "out").fc.weight.dtype == mx.bfloat16


# --- whole or not at all


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    drafter = load_drafter(GOLDEN / CASES[0])
    config = config_of(drafter.args)

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_config", full)
        with pytest.raises(OSError, match="no space"):
            save_drafter(drafter, tmp_path / "out", config, "card")
    changed = load_drafter(GOLDEN / CASES[0])
    changed.norm.weight = -changed.norm.weight
    with monkeypatch.context() as patch:
        patch.setattr(export, "load_drafter", lambda *_, **__: changed)
        with pytest.raises(OSError, match=r"`norm.weight` differs"):
            save_drafter(drafter, tmp_path / "out", config, "card")
    assert not list(tmp_path.iterdir())
    save_drafter(drafter, tmp_path / "out", config, "card")
    with pytest.raises(FileExistsError, match="already exists"):
        save_drafter(drafter, tmp_path / "out", config, "card")


def test_a_config_or_tensor_at_odds_is_named(tmp_path):
    drafter = load_drafter(GOLDEN / CASES[0])
    config = config_of(drafter.args)
    with pytest.raises(ValueError, match="`mask_token_id` is 501"):
        other = replace(drafter.args, mask_token_id=3)
        save_drafter(drafter, tmp_path / "out", config_of(other), "card")
    drafter.fc.weight = drafter.fc.weight.astype(mx.float16)
    with pytest.raises(ValueError, match=r"`fc.weight` is .*float16"):
        save_drafter(drafter, tmp_path / "out", config, "card")
    drafter.set_dtype(mx.float16)
    with pytest.raises(ValueError, match="has to be bfloat16 or float32"):
        save_drafter(drafter, tmp_path / "out", config, "card")
    assert not list(tmp_path.iterdir())


# --- refusals and the command


@pytest.mark.parametrize(
    "model, args, message",
    [
        ("{target}", [], "is not a DFlash drafter"),
        ("{empty}", [], "has no config.json"),
        ("no/such/folder", [], "'no/such/folder' is neither"),
        ("{drafter}", ["-q", "-d"], "either --quantize or --dequantize"),
        ("{drafter}", ["-d"], "is not quantized; leave --dequantize out"),
        ("{quantized}", [], "already quantized; --dequantize undoes it"),
        ("{quantized}", ["-q"], "already quantized; --dequantize undoes it"),
        ("{drafter}", ["-q", "--q-bits", "7"], "--q-bits is 7 but has to be one of 2, 3, 4, 5, 6"),
        ("{drafter}", ["-q", "--q-bits", "1"], "--q-bits is 1"),
        ("{drafter}", ["-q", "--q-group-size", "16"], "--q-group-size is 16"),
        ("{drafter}", ["-q", "--q-codebook-bits", "0"], "--q-codebook-bits is 0"),
        ("{drafter}", ["--q-bits", "4"], "--q-bits has an effect only with --quantize"),
        ("{drafter}", ["--q-codebook-bits", "4"], "--q-codebook-bits has an effect only"),
        ("{drafter}", ["--mlx-path", "{target}"], "target already exists"),
        ("{drafter}", ["--upload-repo", "a/b/c"], "a/b/c"),
    ],
)
def test_refused_in_one_line_before_weights_are_read(
    model, args, message, invoke, model_folders, tmp_path, monkeypatch
):
    def unread(*_, **__):
        raise AssertionError("weights were read")

    folder = tmp_path / "quantized"
    write_drafter(folder, V2 | {"quantization": {"bits": 4, "group_size": 32}})
    monkeypatch.setattr(mx, "load", unread)
    monkeypatch.chdir(tmp_path)
    places = {f"{{{f.name}}}": str(f) for f in (*model_folders.iterdir(), folder)}
    args = [places.get(arg, arg) for arg in ("--model", model, *args)]
    status, out, err = invoke(*args, main=main)
    assert (status, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err and list(tmp_path.iterdir()) == [folder]


def test_a_group_that_divides_nothing_is_refused(tmp_path):
    config = nested(target_layer_ids=[1], conv_group_size=8) | dict(
        hidden_size=96, head_dim=24, intermediate_size=96
    )
    source = write_drafter(tmp_path / "source", config)
    with pytest.raises(ValueError, match="`q_group_size` is 64 but has to divide"):
        command.convert(str(source), tmp_path / "out", Quantization())
    assert not (tmp_path / "out").exists()


def test_upload_takes_the_new_folder_and_keeps_its_card(tmp_path, monkeypatch):
    uploads, out = [], tmp_path / "out"

    def upload(path, repo):
        uploads.append((path, repo, "folder"))
        (Path(path) / "README.md").write_text("about a language model")

    class Api:
        def upload_file(self, path_or_fileobj, path_in_repo, repo_id):
            uploads.append((path_in_repo, repo_id, path_or_fileobj.read_text()))

    monkeypatch.setattr(command, "upload_to_hub", upload)
    monkeypatch.setattr(command, "HfApi", Api)
    command.convert(str(write_drafter(tmp_path / "source")), out, upload_repo="me/drafter")
    card = (out / "README.md").read_text()
    assert "--draft-model me/drafter" in card
    assert uploads == [(str(out), "me/drafter", "folder"), ("README.md", "me/drafter", card)]


def test_a_failed_upload_keeps_the_card(tmp_path, monkeypatch):
    def upload(path, repo):
        (Path(path) / "README.md").write_text("about a language model")
        raise OSError("no network")

    monkeypatch.setattr(command, "upload_to_hub", upload)
    source = write_drafter(tmp_path / "source")
    with pytest.raises(OSError, match="no network"):
        command.convert(str(source), tmp_path / "out", upload_repo="me/drafter")
    assert "--draft-model me/drafter" in (tmp_path / "out" / "README.md").read_text()


def test_the_command_as_a_process(tmp_path):
    source = write_drafter(tmp_path / "source")
    arguments = ["convert", "--hf-path", str(source), "-q", "--q-bits", "8", "--q-group-size", "32"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", "from mlx_dflash2.__main__ import main; main()", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("Wrote mlx_model: ") and "8 bits in groups of 32" in done.stdout
    assert load_drafter(tmp_path / "mlx_model").fc.bits == 8


@pytest.mark.parametrize("flag", ["--q-mode", "--quant-predicate", "--trust-remote-code"])
def test_flags_of_mlx_lm_without_meaning_say_why(invoke, tmp_path, flag):
    status, out, err = invoke("--model", "x", flag, "y", main=main)
    assert status == 2 and not out and f"error: {flag} is not supported: a drafter" in err


def test_every_flag_of_mlx_lm_convert_is_known():
    theirs = importlib.import_module("mlx_lm.convert").configure_parser()
    ours = {
        f
        for action in options_of("convert").setup_arg_parser()._actions
        for f in action.option_strings
    }
    assert {f for action in theirs._actions for f in action.option_strings} <= ours
