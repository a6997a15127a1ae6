"""A target whose layers are split over machines is refused by every one of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import make_model

from mlx_dflash2.targets import bind, language_model

PIPELINED = ("qwen2", "qwen3_moe", "qwen3_5", "qwen3_next")
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import mlx.core as mx
from support.tiny import make_model
from mlx_dflash2.targets import bind, language_model

group = mx.distributed.init(strict=True, backend="ring")
for kind in {kinds!r}:
    model = make_model(kind)
    language_model(model).model.pipeline(group)
    try:
        bind(model)
    except ValueError as error:
        print(f"rank {{group.rank()}} of {{group.size()}}, {{kind}}: {{error}}", flush=True)
"""


# The console script, wherever it is installed.
MLX_LAUNCH = """
from importlib.metadata import entry_points
entry_points(group="console_scripts")["mlx.launch"].load()()
"""


class Group:
    """One of several machines, as ``pipeline`` sees it."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.mark.parametrize("kind", PIPELINED)
@pytest.mark.parametrize("rank, size", [(r, size) for size in (2, 3, 4) for r in range(size)])
def test_every_rank_refuses(kind, rank, size):
    model = make_model(kind)
    language_model(model).model.pipeline(Group(rank, size))
    with pytest.raises(ValueError, match="split over several machines"):
        bind(model)


@pytest.mark.parametrize("kind", PIPELINED)
def test_a_group_of_one_is_no_split(kind):
    model = make_model(kind)
    language_model(model).model.pipeline(Group(0, 1))
    assert len(bind(model).layers) == 4


@pytest.mark.slow
def test_two_processes_refuse_alike(tmp_path):
    file = tmp_path / "run.py"
    file.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), kinds=PIPELINED))
    launch = [sys.executable, "-c", MLX_LAUNCH, "-n", "2", "--backend", "ring"]
    launch += ["--python", sys.executable, str(file)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
    for rank in range(2):
        for kind in PIPELINED:
            assert f"rank {rank} of 2, {kind}: A target that is split" in done.stdout, done.stderr
