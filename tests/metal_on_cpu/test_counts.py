"""What kernels execute stays what it was, or falls; the doctor predicts from these counts."""

import pytest

from mlx_dflash2.doctor.products import own_instructions, stock_instructions
from tools.kernel_counts import count, items

ITEMS = [pytest.param(item, id=item.label) for item in items()]


@pytest.mark.parametrize("item", ITEMS)
def test_no_kernel_executes_more_than_recorded(clang, item):
    each = count(item.run).instructions / item.units
    assert 0.9 * item.most < each <= item.most
    rows = int(item.label.split(" rows")[0].split()[-1]) if " rows" in item.label else 0
    if 0 < rows <= 8 and "4 bits" in item.label:
        formula = stock_instructions if "MLX" in item.label else own_instructions
        assert formula(rows) == pytest.approx(each, rel=0.03)
