"""What `doctor` says of a pair from configs and headers, against the pair itself."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.gemma4_text import ModelArgs
from support.tiny import (
    CONFIGS,
    DENSE,
    HYBRID,
    cache_arrays,
    drafter_config,
    make_drafter,
    make_model,
)
from support.tiny_pair import save_drafter, save_target

from mlx_dflash2 import embedded, load_drafter
from mlx_dflash2.checkpoint import files as checkpoint
from mlx_dflash2.checkpoint.files import TensorHeader as Stored
from mlx_dflash2.checkpoint.load import load
from mlx_dflash2.doctor import chips, plan, reads
from mlx_dflash2.doctor.touched import parameters, touched
from mlx_dflash2.targets import bind
from tools.full_size import headers

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
    for (name, whole), count in touched(model, drafter, PROMPT, width).items():
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
    found = plan.Plan(CONFIGS[kind], drafter.args, headers(model), headers(drafter), 4)
    assert found.round(width, len(PROMPT)).weights == really_read(model, drafter, width)


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
    held = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    assert sum(map(reads.num_bytes, found.target.values())) == held
    held = sum(value.nbytes for _, value in tree_flatten(drafter.parameters()))
    assert sum(map(reads.num_bytes, found.drafter.values())) == held


@pytest.mark.parametrize(
    "kind", [DENSE, HYBRID, "llama-sliding", "gemma3_text", "muse_glimmer", *GEMMA4]
)
@pytest.mark.parametrize("length", [12, 40])
def test_bytes_of_keys_and_values(kind, length):
    model = make_model(kind)
    cache = bind(model).make_cache()
    bind(model).forward(mx.arange(length)[None], cache)
    bind(model).forward(mx.array([[1]]), cache)
    arrays = [a for a in cache_arrays(cache) if a.ndim == 4 and a.shape[1] <= 2]
    config = CONFIGS[kind] | {"model_type": kind.split("-")[0]}
    assert reads.cache_bytes(config, length + 1, 4) == sum(a.nbytes for a in arrays)


def test_context_is_bounded_by_the_window():
    drafter = make_drafter(window=16)
    assert reads.context_bytes(drafter.args, 2000, 4) == 2 * 15 * 2 * 2 * 16 * 4
    assert reads.context_bytes(make_drafter(window=None).args, 30, 4) == 2 * 30 * 2 * 2 * 16 * 4


def test_quantising_is_planned_as_it_is_done(tmp_path):
    config = drafter_config() | {"hidden_size": 64}
    drafter = make_drafter()
    weights = dict(tree_flatten(drafter.parameters()))
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    planned = reads.drafter_tensors(headers(drafter), "F32", 4)
    with pytest.warns(UserWarning, match="group_size"):
        loaded = load_drafter(folder, bits=4, dtype=mx.float32)
    assert planned == headers(loaded)


def test_gemma4_fields_that_a_config_leaves_out_are_mlx_lms():
    args = ModelArgs()
    width = 2 * args.num_key_value_heads * 4
    # Fifteen of 35 layers keep keys and values, every fifth of them sees all.
    expected = (12 * 512 * args.head_dim + 3 * 1000 * args.global_head_dim) * width
    for config in ({"model_type": "gemma4_text"}, {"model_type": "gemma4", "text_config": {}}):
        assert reads.cache_bytes(config, 1000, 4) == expected


@pytest.mark.parametrize("field", ["num_experts_per_tok", "experts_per_token", "top_k_experts"])
def test_experts_count_by_how_many_are_chosen(field):
    config = {"num_experts": 4, field: 2}
    tensors = {"model.layers.0.mlp.switch_mlp.up_proj.weight": Stored("F32", (4, 32, 64))}
    one, _ = reads.target_reads(tensors, config, 1)
    many, _ = reads.target_reads(tensors, config, 30)
    assert one == 4 * 32 * 64 * 4 // 2 and many >= 4 * 32 * 64 * 4 - 1


@pytest.fixture
def large():
    """A pair of the published size, in which reading weights is all that counts."""
    target = {
        "model.embed_tokens.weight": Stored("BF16", (1000, 100)),
        "model.layers.0.mlp.up_proj.weight": Stored("U32", (10**6, 4000)),
        "model.layers.0.mlp.up_proj.scales": Stored("BF16", (10**6, 10)),
        "lm_head.weight": Stored("BF16", (10**6, 100)),
    }
    args = make_drafter().args
    config = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=64, layer_types=["full"])
    return plan.Plan(config, args, target, {"hidden_norm.weight": Stored("BF16", (64,))}, 2)


def test_a_second_read_of_quantised_weights_sets_the_width(large):
    # Five rows cost one read of the target, six cost two.
    width, ceiling = large.best_width(4.0, 0, 100.0)
    assert width == 5 and ceiling > 1 / large.seconds(1, 0, 100.0)
    assert large.seconds(6, 0, 100.0) == pytest.approx(2 * large.seconds(5, 0, 100.0), rel=0.02)


def test_verdict_names_width_and_bound(large):
    assert "pays from an acceptance length of" in plan.verdict(large, 0, None)
    good = plan.Plan(**vars(large) | {"length": 4.0})
    assert "should pay" in (line := plan.verdict(good, 0, 100.0)) and "verify width 5" in line
    # The bandwidth is on both sides.
    assert line == plan.verdict(good, 0, 400.0) == plan.verdict(good, 0, None)
    poor = plan.Plan(**vars(large) | {"length": 1.01})
    assert "should not pay" in plan.verdict(poor, 0, 100.0)
    slow = plan.Plan(**vars(good) | {"device": "cpu"})
    assert "should not pay" in plan.verdict(slow, 0, 100.0)


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
    assert all(chip.source.startswith(("https://", "LPDDR")) for chip in chips.CHIPS)


def test_a_pair_of_many_weights_is_counted_in_pieces():
    """The full size has more weights than MLX takes names for at once."""
    model, drafter = make_model(DENSE), make_drafter()
    whole = touched(model, drafter, PROMPT, 8)
    assert touched(model, drafter, PROMPT, 8, names_at_once=7) == whole


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
    assert {repo for repo, files in asked if "*.safetensors" in files} == {*places}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_target_layers": 6}))
    asked.clear()
    with pytest.raises(ValueError, match="num_target_layers"):
        plan.read_plan("a/target", "a/drafter")
    assert asked and all(files == checkpoint.CONFIG_FILES for _, files in asked)
