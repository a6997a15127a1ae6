"""Targets that cannot be split are refused before any collective, so on every rank."""

from types import SimpleNamespace

import pytest
from support.saved_models import save_target

from mlx_dflash2.checkpoint.target import find_target, read_target


@pytest.mark.parametrize(
    ("kind", "ranks", "told"),
    [
        ("qwen3", 3, "`num_attention_heads` is 4 but has to divide by the 3 ranks"),
        ("phi3", 2, "mlx-lm cannot split models of type 'phi3' over machines"),
    ],
)
def test_a_target_that_cannot_be_split_is_refused(tmp_path, kind, ranks, told):
    group = SimpleNamespace(size=lambda: ranks)
    with pytest.raises(ValueError, match=told):
        read_target(find_target(save_target(tmp_path / kind, kind)), group=group)
