"""Several processes that train one drafter."""

import json
import os
import subprocess
import sys
import time

import pytest
from support.saved_models import save_target

from mlx_dflash2 import load_drafter
from mlx_dflash2.train import checkpoints
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.run import Run

OPTIONS = (
    "--num-layers 1 --block-size 4 --selector-rank 8 --mask-token-id 5 --target-layer-ids 1 3 "
    "--num-prompts 6 --max-tokens 12 --iters 6 --steps-per-report 3 --anchors 4 --batch-size 2 "
    "--num-eval-prompts 2 --eval-max-tokens 8"
).split()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("processes") / "target")


def start(rank: int, tmp_path, *arguments) -> subprocess.Popen:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["127.0.0.1:32471"], ["127.0.0.1:32472"]]))
    environment = os.environ | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
    command = [sys.executable, "-m", "mlx_dflash2.train", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    deadline = time.monotonic() + 240
    try:
        return [p.communicate(timeout=deadline - time.monotonic())[1] for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_two_processes_train_one_drafter(tmp_path, target_path):
    """The stages of one result run once; a time limit stops both; the rest is one run."""
    options = ["--model", target_path, "--output-path", tmp_path / "run", *OPTIONS]
    for limit in (["--time-limit", "1e-9"], []):
        both = [start(rank, tmp_path, *options, *limit) for rank in (0, 1)]
        said = finish(both)
        assert [process.returncode for process in both] == [0, 0], said
        assert ("fit: stopped at step 0 of 6" in said[0]) == bool(limit)
        assert "M parameters" not in said[1]
    assert load_drafter(tmp_path / "run" / "export").args.block_size == 4
    saved = checkpoints.load(checkpoints.files(tmp_path / "run" / "checkpoints")[-1])
    assert (saved.step, saved.settings["processes"]) == (6, 2)


@pytest.mark.slow
def test_processes_of_different_states_are_refused(tmp_path, target_path):
    options = ["--model", target_path, "--no-cache", *OPTIONS]
    Run(parse([*map(str, options), "--output-path", str(tmp_path)])).data()
    options = ["fit", "--data", tmp_path / "data", *options]
    both = [
        start(rank, tmp_path, *options, "--output-path", tmp_path / "run", "--seed", rank)
        for rank in (0, 1)
    ]
    said = finish(both)
    assert [process.returncode for process in both] == [1, 1], said
    for text in said:
        last = text.strip().splitlines()[-1]
        assert last.startswith("error: The processes' weights differ at step 0;")
