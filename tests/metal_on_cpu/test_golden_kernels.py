"""The golden drafters once more, every op of theirs a kernel on the bench."""

import pytest
from golden import CASES
from test_golden import test_rounds_match_the_reference as match_the_reference

from mlx_dflash2.kernels import active_kernels

from .test_kernels import kernels  # noqa: F401, a fixture

SECOND = [case for case in CASES if case.startswith("dflash2")]


@pytest.mark.parametrize("case", SECOND)
def test_golden_rounds_pass_through_the_kernels(kernels, case):  # noqa: F811
    match_the_reference(case)
    assert active_kernels() == dict.fromkeys(
        ("grouped_conv", "grouped_conv_norm", "top_k", "pair_walk"), "metal"
    )
    assert {"grouped_conv", "grouped_conv_norm", "top_k", "pair_walk"} <= set(kernels.launched)
