"""Whether a drafter fits a target: each way it may not, by name and with both values."""

import pytest
from support.drafters import V1, nested

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.fit import MAX_VOCAB_PADDING, check_fit
from mlx_dflash2.targets.shape import TargetShape

TARGET = TargetShape(hidden_size=64, vocab_size=512, num_layers=4)


def args(**fields) -> DrafterArgs:
    return DrafterArgs.from_dict(nested() | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(vocab_size=512 + MAX_VOCAB_PADDING),
        dict(vocab_size=500),
        dict(target_hidden_size=64),
        dict(num_target_layers=None),
    ],
    ids=repr,
)
def test_fits(fields):
    check_fit(args(**fields), TARGET)


def test_a_depth_that_the_config_leaves_open_fits_any_deeper_target():
    check_fit(args(num_target_layers=None), TargetShape(64, 512, 40))


@pytest.mark.parametrize(
    "changed, target, name, values",
    [
        (args(hidden_size=128, target_hidden_size=64), TARGET, "hidden_size", ("128", "64")),
        (args(target_hidden_size=32), TARGET, "target_hidden_size", ("32", "64")),
        (args(num_target_layers=7), TARGET, "num_target_layers", ("7", "4")),
        (
            args(num_target_layers=None),
            TargetShape(64, 512, 3),
            "target_layer_ids",
            ("[1, 3]", "0 to 2"),
        ),
        (args(vocab_size=4096), TARGET, "vocab_size", ("4096", "512")),
        (
            DrafterArgs.from_dict(nested(mask_token_id=512)),
            TARGET,
            "mask_token_id",
            ("512", "below 512"),
        ),
        (
            DrafterArgs.from_dict(nested(selector_top_k=300, mask_token_id=1)),
            TargetShape(64, 256, 4),
            "selector_top_k",
            ("300", "256"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field_and_both_values(changed, target, name, values):
    with pytest.raises(ValueError) as error:
        check_fit(changed, target)
    message = str(error.value)
    assert f"`{name}`" in message and "\n" not in message
    assert all(value in message for value in values)


def test_a_mask_may_be_a_padding_row():
    check_fit(DrafterArgs.from_dict(nested(mask_token_id=511)), TARGET)


def test_dflash_1_is_checked_alike():
    check_fit(DrafterArgs.from_dict(V1), TARGET)
    with pytest.raises(ValueError, match="num_target_layers"):
        check_fit(DrafterArgs.from_dict(V1), TargetShape(64, 512, 12))
