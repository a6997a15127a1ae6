"""The golden drafters once more, every op of theirs a kernel on the bench."""

import pytest
from support.golden import CASES, check_rounds

from mlx_dflash2.kernels import active_kernels

SECOND = [case for case in CASES if case.startswith("dflash2")]


@pytest.mark.parametrize("case", SECOND)
def test_golden_rounds_pass_through_the_kernels(kernels, case):
    check_rounds(case)
    assert active_kernels() == dict.fromkeys(
        ("grouped_conv", "grouped_conv_norm", "top_k", "pair_walk"), "metal"
    )
    assert {"grouped_conv", "grouped_conv_norm", "top_k", "pair_walk"} <= set(kernels.launched)
