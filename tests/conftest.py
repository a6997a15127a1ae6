import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)
