"""The builder of published shapes: its numbers at full size, its run at a reduced one."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from tools import full_size

TEXT = full_size.QWEN3_8_27B["text_config"]
SMALL = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512,
)  # fmt: skip
TARGET = full_size.QWEN3_8_27B | {
    "text_config": TEXT
    | SMALL
    | dict(num_hidden_layers=8, linear_num_key_heads=2, linear_num_value_heads=4)
    | dict(linear_key_head_dim=32, linear_value_head_dim=32)
}
FIELDS = full_size.QWEN3_8_27B_DRAFTER["dflash_config"]
DRAFTER = full_size.QWEN3_8_27B_DRAFTER | SMALL | {
    "num_target_layers": 8,
    "dflash_config": FIELDS
    | dict(target_layer_ids=[0, 2, 4, 5, 7], mask_token_id=500, selector_rank=64),
}  # fmt: skip


def test_drafter_has_the_published_number_of_parameters():
    assert full_size.count_parameters(full_size.QWEN3_8_27B_DRAFTER) == 1_924_404_480
    drafter = Drafter(DrafterArgs.from_dict(full_size.QWEN3_8_27B_DRAFTER))
    assert len(tree_flatten(drafter.parameters())) == 81


@pytest.fixture(scope="module")
def results():
    said = []
    found = full_size.run(TARGET, DRAFTER, [5, 6, 7], rounds=2, say=said.append)
    assert said[0].startswith("built in") and len(said) == 1 + len(found["tokens"])
    return found


def test_two_rounds_give_plain_tokens(results):
    assert results["equal"] and results["rounds"] == 2 and results["drafted"] == 14
    assert len(results["tokens"]) == 3 + results["accepted"]
    json.dumps(results)


def test_estimate_is_what_a_round_reads(results):
    estimate, read = results["round_bytes_estimated"], results["round_bytes_read"]
    # Rows that are only looked up count in the estimate alone.
    assert read <= estimate < read * 1.1


def test_weights_keep_the_size_of_a_row():
    model = full_size.build_target(TARGET)
    weights = dict(tree_flatten(model.parameters()))
    assert {w.dtype for w in weights.values()} == {mx.float32, mx.uint32}
    name = "language_model.model.layers.3.self_attn.q_proj"
    packed = [weights[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    dense = mx.dequantize(*packed, full_size.GROUP_SIZE, full_size.BITS)
    assert mx.std(dense).item() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(mx.mean(dense).item()) < 0.01


def test_it_runs_at_a_reduced_size(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(full_size, "QWEN3_8_27B", TARGET)
    monkeypatch.setattr(full_size, "QWEN3_8_27B_DRAFTER", DRAFTER)
    full_size.main(tmp_path, prompt=[5, 6, 7])
    out = capsys.readouterr().out
    assert "equal to plain decoding's: True" in out and "a round reads" in out
    assert json.loads((tmp_path / "full_size.json").read_text())["rounds"] == 2
