"""A training run on disk."""

import mlx.core as mx
import pytest

from mlx_dflash2.train import checkpoints


def test_the_last_two_checkpoints_are_kept(tmp_path):
    for step in (9, 10, 100, 20):
        checkpoints.save(tmp_path, step, {"w": {"a": [mx.ones(2), mx.zeros(1)]}}, {})
        (tmp_path / "partial.safetensors").write_bytes(b"left behind")
    assert [file.stem for file in checkpoints.files(tmp_path)] == ["step-00000020", "step-00000100"]
    saved = checkpoints.load(checkpoints.files(tmp_path)[-1])
    assert saved.step == 100
    assert saved.trees["w"]["a"][0].tolist() == [1, 1]


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoints.save(tmp_path, 1, {"w": {"a": mx.ones(64)}}, {})
    file = checkpoints.files(tmp_path)[0]
    whole = file.read_bytes()
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"a": mx.ones(2)})
    for damaged in (whole[:-40], whole[:20], b"", (tmp_path / "other.safetensors").read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^.*step-00000001.* is not a checkpoint [^\n]*$"):
            checkpoints.load(file)
    with pytest.raises(FileNotFoundError, match=r"^There is no checkpoint [^\n]*$"):
        checkpoints.load(tmp_path / "step-00000002.safetensors")
