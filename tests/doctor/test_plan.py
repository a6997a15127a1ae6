"""What `doctor` says of a pair from configs and headers, against the pair itself."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from support.saved_models import save_drafter, save_target
from support.tiny import (
    CONFIGS,
    DENSE,
    HYBRID,
    cache_arrays,
    make_drafter,
    make_model,
)

from mlx_dflash2 import embedded, load_drafter
from mlx_dflash2.checkpoint import files as checkpoint
from mlx_dflash2.checkpoint.target import load
from mlx_dflash2.doctor import chips, estimated_reads, plan, predict
from mlx_dflash2.doctor.counted_reads import counted_reads, parameters
from mlx_dflash2.doctor.estimated_reads import context_bytes, slowdown, target_bytes
from mlx_dflash2.doctor.products import Gpu
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.machine import num_bytes
from mlx_dflash2.targets import bind
from tools import full_size

PROMPT = list(range(5, 17))
# Kernels' two sides are looked up one by one, which together read them once.
SIDES = "base_kernel"


def looked_up(name: str, args, width: int) -> int:
    """Rows of a table that a round looks up, by its own rules."""
    length, k = args.block_size - 1, args.selector_top_k
    if "embed_tokens" in name:
        return width
    return {"predecessor": 1 + (length - 1) * k, "successor": length * k}[name.split(".")[2][:-9]]


def really_read(model, drafter, width: int) -> int:
    weights = parameters(model, drafter)
    packed = "drafter.candidate_selector.predecessor_codebook.scales" in weights
    total, rows = 0, {}
    for (name, whole), count in counted_reads(model, drafter, PROMPT, width).items():
        weight = weights[name]
        if whole or SIDES in name:
            total += weight.nbytes * (count if whole else 1)
        elif "codebook" in name and packed:
            count = 1 + (drafter.block_size - 1) * drafter.args.selector_top_k
            rows[name] = weight.nbytes // weight.shape[0] * count
        else:
            rows[name] = weight.nbytes // weight.shape[0] * looked_up(name, drafter.args, width)
    return total + sum(rows.values())


GEMMA4 = ["gemma4", "gemma4_text-shared", "gemma4_text-inputs", "gemma4_text-global"]


@pytest.fixture(autouse=True)
def more_kinds(monkeypatch):
    changes = dict(global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True)
    config = CONFIGS["gemma4_text-shared"] | changes | dict(num_kv_shared_layers=1)
    monkeypatch.setitem(CONFIGS, "gemma4_text-global", config)


@pytest.mark.parametrize(
    "kind, bits",
    [(DENSE, None), (DENSE, 4), (HYBRID, None), (HYBRID, 4), *((kind, None) for kind in GEMMA4)],
)
@pytest.mark.parametrize("width", [2, 8])
def test_bytes_are_those_that_the_graph_reads(kind, bits, width):
    model, drafter = make_model(kind, bits=bits), make_drafter()
    found = plan.Plan(bind(model), drafter)
    assert found.round(width, len(PROMPT)).weights == really_read(model, drafter, width)


def test_what_rows_cost_on_the_cpu(monkeypatch):
    dense, packed = make_model(DENSE), make_model(DENSE, bits=4)
    for slow, rows in ((True, 8), (False, 1)):
        monkeypatch.setattr(estimated_reads, "has_slow_blas", lambda slow=slow: slow)
        assert [slowdown(model, 8, None) for model in (dense, packed)] == [rows, 8]


@pytest.mark.parametrize(
    "chip, published",
    [
        ("M4 Pro", {1: 1, 2: 1.00, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84}),
        ("M3 Max", {2: 1.00, 4: 1.28, 8: 2.50}),
        ("M5 Max", {2: 1.04, 3: 1.11, 4: 1.27, 5: 1.44, 8: 2.22}),
    ],
)
def test_what_rows_cost_is_what_was_published(chip, published):
    """Tables of MLX's quantized product, 4 bits in groups of 64, relative to one row."""
    gpu = Gpu.of(chips.find_chip(chip))
    for rows, expected in published.items():
        assert gpu.slowdown(rows, 0.5625) == pytest.approx(expected, rel=0.15), rows


def test_more_bits_hide_more_rows():
    four, eight = (slowdown(make_model(DENSE, bits=bits), 5, Gpu()) for bits in (4, 8))
    assert 1 < eight < four < 5
    # Two rows are two products on the chips before M3.
    assert Gpu.of(chips.find_chip("M2 Max")).slowdown(2, 0.5625) == 2


@pytest.fixture(scope="module")
def real():
    try:
        folder = embedded.target_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return folder, embedded.drafter_path()


def test_bytes_of_the_embedded_pair(real):
    found = plan.read_plan(*real)
    model, _ = load(str(real[0]))
    drafter = load_drafter(real[1], dtype=mx.float32)
    estimate = found.round(8, 100)
    assert estimate.weights == really_read(model, drafter, 8)
    assert num_bytes(found.target.model) == num_bytes(model)
    assert num_bytes(found.drafter) == num_bytes(drafter)


@pytest.mark.parametrize(
    "kind", [DENSE, HYBRID, "llama-sliding", "gemma3_text", "muse_glimmer", "gpt_oss", *GEMMA4]
)
@pytest.mark.parametrize("length", [12, 40])
def test_bytes_of_the_past(kind, length):
    """Keys and values within their windows, and recurrent states."""
    target = bind(make_model(kind))
    cache = target.make_cache()
    target.forward(mx.arange(length)[None], cache)
    target.forward(mx.array([[1]]), cache)
    expected = sum(array.nbytes for array in cache_arrays(cache))
    assert target_bytes(target).past(length + 1) == expected


def test_context_is_bounded_by_the_window():
    assert context_bytes(make_drafter(window=16), 2000) == 2 * 15 * 2 * 2 * 32 * 4
    assert context_bytes(make_drafter(window=None), 30) == 2 * 30 * 2 * 2 * 32 * 4


def shapes(model) -> dict:
    return {name: (x.dtype, x.shape) for name, x in tree_flatten(model.parameters())}


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("bits", [None, 4])
def test_a_drafter_is_planned_as_it_is_loaded(bits, target, tmp_path):
    folder = save_drafter(tmp_path / "drafter")
    planned = plan.read_plan(target, folder, bits).drafter
    assert shapes(planned) == shapes(load_drafter(folder, bits=bits, dtype=mx.float32))


@pytest.mark.parametrize("mode, bits", [("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_a_target_is_planned_as_mlx_lm_quantizes_it(mode, bits, tmp_path):
    """One matrix has a width of its own, as mixed quantizations have."""
    folder, group = save_target(tmp_path / "target"), 32
    model, own = make_model(DENSE), "model.layers.1.mlp.up_proj"
    own_scheme = {"bits": 8, "group_size": 64, "mode": "affine"}
    nn.quantize(
        model, group, bits, mode=mode,
        class_predicate=lambda path, module: hasattr(module, "to_quantized")
        and (own_scheme if path == own else True),
    )  # fmt: skip
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": group, "mode": mode, own: own_scheme}
    (folder / "config.json").write_text(json.dumps(config))
    found = plan.read_plan(folder, save_drafter(tmp_path / "drafter"))
    assert shapes(found.target.model) == shapes(model)
    assert found.sizes.weights(3) + found.sizes.head == sum(
        x.nbytes // x.shape[0] * 3 if "embed_tokens" in name else x.nbytes
        for name, x in tree_flatten(model.parameters())
    ) + num_bytes(model.model.embed_tokens)


@pytest.mark.parametrize(
    "kind, share",
    [("qwen3_moe", 1 / 2), ("mixtral", 1 / 2), ("gpt_oss", 1 / 2), ("gemma4_text-experts", 3 / 4)],
)
@pytest.mark.parametrize("bits", [None, 4])
def test_experts_count_by_how_many_are_chosen(kind, share, bits, monkeypatch):
    changes = dict(enable_moe_block=True, num_experts=4, top_k_experts=3, moe_intermediate_size=32)
    monkeypatch.setitem(CONFIGS, "gemma4_text-experts", CONFIGS["gemma4_text-inputs"] | changes)
    model = make_model(kind, bits=bits)
    before = shapes(model)
    sizes = target_bytes(bind(model))
    stacks = sum(
        x.nbytes for name, x in tree_flatten(model.parameters())
        if any(part in name for part in (".switch_mlp.", ".switch_glu.", ".experts."))
    )  # fmt: skip
    one, many = sizes.weights(1) - sizes.row, sizes.weights(40) - 40 * sizes.row
    assert stacks > 0 and one == sizes.always + int(stacks * share)
    assert stacks - 2 <= many - sizes.always <= stacks
    # Counting has changed nothing of the model.
    assert shapes(model) == before


@pytest.fixture(scope="module")
def large():
    """A pair of the published size, in which reading weights is nearly all that counts."""
    config = full_size.QWEN3_8_27B
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    drafter = Drafter(DrafterArgs.from_dict(full_size.QWEN3_8_27B_DRAFTER))
    return plan.Plan(bind(model), drafter)


def test_bytes_of_the_published_size(large):
    """48 recurrent layers keep states of a fixed size, 16 others keys and values."""
    assert large.sizes.states == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 4)
    assert large.sizes.past(1000) - large.sizes.states == 16 * 2 * 4 * 256 * 1000 * 4


def test_what_rows_cost_sets_the_width(large):
    width, ceiling = large.best_width(4.0, 0, 100.0)
    assert 3 <= width <= 5 and ceiling > 1 / large.seconds(1, 0, 100.0)
    m5, m2 = (replace(large, gpu=Gpu.of(chips.find_chip(name))) for name in ("M5 Max", "M2 Max"))
    assert m5.best_width(4.0, 0, 100.0)[0] >= width
    # Rows cost a read each there: drafting cannot pay.
    assert m2.best_width(4.0, 0, 100.0)[1] < 1 / m2.seconds(1, 0, 100.0)
    assert "should not pay" in plan.verdict(replace(m2, length=4.0), 0, 100.0)


@pytest.fixture(scope="module")
def published(large):
    """The pair as others have measured it: the drafter in 4 bits, activations in 16."""
    drafter = Drafter(DrafterArgs.from_dict(full_size.QWEN3_8_27B_DRAFTER))
    nn.quantize(drafter, 64, 4, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    target = bind(large.target.model)
    target.model.set_dtype(mx.bfloat16)
    drafter.set_dtype(mx.bfloat16)
    return plan.Plan(target, drafter, length=5.09)


@pytest.mark.parametrize(
    "chip, plain", [("M2 Max", 21.3), ("M3 Max", 23.0), ("M4 Pro", 14.7), ("M5 Max", 33.0)]
)
def test_plain_decoding_is_predicted_as_others_measured_it(published, chip, plain):
    parts = predict.predict(published, 1, 1000, chips.find_chip(chip))
    assert 1000 / sum(parts.values()) == pytest.approx(plain, rel=0.15)


def test_a_round_is_predicted_as_others_measured_it(published):
    """56 to 62 tokens/s with MLX's own kernels and other loops; others' kernels bound ours."""
    m5, m3 = (chips.find_chip(name) for name in ("M5 Max", "M3 Max"))
    stock = sum(predict.predict(published, 8, 500, m5).values())
    # Their hosts do not overlap with the device, and attention of 8 rows is not fused there.
    assert 59 < 1000 * 5.09 / stock < 1.3 * 59
    ours = sum(predict.predict(published, 8, 500, m3, own=True).values())
    assert ours < 0.75 * sum(predict.predict(published, 8, 500, m3).values())
    width, speed = predict.best(published, 1000, m3, own=True)
    assert width > predict.best(published, 1000, m3, own=False)[0] and speed < 92
    # With MLX's own kernels drafting gains nothing on the chips before M3.
    m2 = chips.find_chip("M2 Max")
    plain = 1000 / sum(predict.predict(published, 1, 1000, m2).values())
    assert predict.best(published, 1000, m2, own=False)[1] < 1.1 * plain


def test_verdict_names_width_and_bound(large):
    assert "pays from an acceptance length of" in plan.verdict(large, 0, None)
    good = replace(large, length=4.0)
    assert "should pay" in (line := plan.verdict(good, 0, 100.0)) and "verify width " in line
    # The bandwidth is on both sides.
    assert line == plan.verdict(good, 0, 400.0) == plan.verdict(good, 0, None)
    assert "should not pay" in plan.verdict(replace(large, length=1.01), 0, 100.0)
    assert "should not pay" in plan.verdict(replace(good, gpu=None), 0, 100.0)


def test_lengths_at_a_width():
    rate = plan.position_rate(4.0, 8)
    assert plan.length_at(rate, 8) == pytest.approx(4.0) and 3 < plan.length_at(rate, 5) < 4
    assert plan.length_at(0.0, 8) == 1 and plan.length_at(1.0, 8) == 8


@pytest.mark.parametrize(
    "name, found",
    [("Apple M4 Max", (410, 546)), ("Apple M1", (68, 68)), ("apple m3 ultra", (819, 819))],
)
def test_chips_are_found_by_name(name, found):
    assert chips.find_chip(name).bandwidth == found


def test_unknown_chips_have_no_bandwidth():
    assert chips.find_chip("AMD EPYC") is None and chips.find_chip("Apple M9 Max") is None
    assert all(chip.source.startswith(("https://", "LPDDR")) for chip in chips.read_chips())


def test_a_pair_of_many_weights_is_counted_in_pieces():
    """The full size has more weights than MLX takes names for at once."""
    model, drafter = make_model(DENSE), make_drafter()
    whole = counted_reads(model, drafter, PROMPT, 8)
    assert counted_reads(model, drafter, PROMPT, 8, names_at_once=7) == whole


# --- what loading refuses, the plan refuses alike


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("model") / "target")


def both_refuse(target, folder, bits=None) -> str:
    messages = []
    for read in (
        lambda: load_drafter(folder, bits=bits),
        lambda: plan.read_plan(target, folder, bits),
    ):
        with pytest.raises(ValueError) as error:
            read()
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "\n" not in messages[0]
    return messages[0]


def test_bits_for_a_quantised_drafter_are_refused(target, tmp_path):
    folder = save_drafter(tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert "already quantized" in both_refuse(target, folder, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("hidden_norm.weight"), "`hidden_norm.weight` is missing"),
        (lambda w: w.pop("layers.1.mlp.up_proj.weight"), "is missing"),
        (lambda w: w.update(more=mx.zeros((2,))), "`more` is unexpected"),
        (lambda w: w.update({"norm.weight": mx.zeros((3,))}), "has shape"),
        (lambda w: w.update({"lm_head.weight": mx.zeros((3,))}), "vocabulary of its own"),
    ],
)
def test_tensors_at_odds_with_the_config_are_refused(change, message, target, tmp_path):
    folder = save_drafter(tmp_path / "drafter")
    weights = mx.load(str(folder / "model.safetensors"))
    change(weights)
    mx.save_safetensors(str(tmp_path / "changed.safetensors"), weights)
    (tmp_path / "changed.safetensors").replace(folder / "model.safetensors")
    assert message in both_refuse(target, folder)


def test_checking_tensors_makes_none(target, tmp_path):
    folder = save_drafter(tmp_path / "drafter")
    plan.read_plan(target, folder)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    plan.read_plan(target, folder)
    size = (folder / "model.safetensors").stat().st_size
    assert mx.get_peak_memory() - before < size / 10


def test_nothing_but_configs_is_downloaded_for_a_pair_that_does_not_fit(
    target, tmp_path, monkeypatch
):
    folder = save_drafter(tmp_path / "drafter")
    places, asked = {"a/target": target, "a/drafter": folder}, []

    def download(repo, revision=None, allow_patterns=None):
        asked.append((repo, tuple(allow_patterns)))
        return str(places[repo])

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    plan.read_plan("a/target", "a/drafter")
    assert {repo for repo, files in asked if "safetensors" in str(files)} == {*places}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_target_layers": 6}))
    asked.clear()
    with pytest.raises(ValueError, match="num_target_layers"):
        plan.read_plan("a/target", "a/drafter")
    assert asked and all(files == checkpoint.CONFIG_FILES for _, files in asked)
