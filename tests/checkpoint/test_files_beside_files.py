"""Weight files beside others: what an index leaves out, second sets, and what it names wrongly."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.drafters import V2, random_weights
from support.folders import INDEX, refused, same, spoil
from support.saved_models import save_drafter, save_target, write_shards
from support.tiny import make_model

from mlx_dflash2.checkpoint.load import load_drafter
from mlx_dflash2.checkpoint.target import load


@pytest.fixture(params=["target", "drafter"])
def model(request, tmp_path):
    """A model in three files with an index, a second set of its weights, and its loader."""
    folder = tmp_path / "model"
    if request.param == "target":
        save_target(folder)
        weights, call = dict(tree_flatten(make_model("qwen3", seed=1).parameters())), load
    else:
        save_drafter(folder)
        weights, call = random_weights(V2), load_drafter
    (folder / "model.safetensors").unlink()
    write_shards(folder, weights)
    return folder, weights, lambda path: call(path)[0] if call is load else call(path)


def test_a_second_set_is_refused_or_told(model):
    folder, weights, call = model
    expected = call(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), {k: 0 * v for k, v in weights.items()})
    if "layers.0.self_attn.q_proj.weight" in weights:
        with pytest.warns(match="does not name model.safetensors; it is ignored"):
            assert same(call(folder), expected)
    else:
        # mlx-lm would read the last one that the file system lists.
        assert "twice, in model" in refused(ValueError, call, folder)


def test_a_second_set_without_an_index_is_refused(model):
    folder, weights, call = model
    (folder / INDEX).unlink()
    mx.save_safetensors(str(folder / "model-copy.safetensors"), weights)
    assert "twice, in model" in refused(ValueError, call, folder)


def test_a_file_of_other_tensors_is_told(model):
    """mlx-lm reads it, and drops what it knows to belong to other parts of a model."""
    folder, _, call = model
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(3)}
    mx.save_safetensors(str(folder / "model-rotary.safetensors"), extra)
    with pytest.warns(match="does not name model-rotary.safetensors"):
        try:
            call(folder)
        except ValueError as error:
            assert "inv_freq" in str(error)


def test_an_index_that_names_tensors_of_no_file_is_refused(model):
    folder, _, call = model
    index = json.loads((folder / INDEX).read_text())
    (name, file), *_ = index["weight_map"].items()
    other = next(f for f in index["weight_map"].values() if f != file)
    for entry, said in (({"other.weight": file}, "other.weight"), ({name: other}, name)):
        (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | entry}))
        message = refused(ValueError, call, folder)
        assert INDEX in message and f"`{said}`" in message, message


def test_an_index_of_another_sharding_is_told(model):
    folder, weights, call = model
    for file in folder.glob("*.safetensors"):
        file.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.warns(match="none of which is there"):
        call(folder)


def test_shards_of_two_models_are_refused(model, tmp_path):
    folder, _, call = model
    name = sorted(folder.glob("model-*"))[0].name
    other = {k: mx.concatenate([v, v]) for k, v in mx.load(str(folder / name)).items()}
    shutil.copytree(folder, tmp_path / "mixed")
    mx.save_safetensors(str(tmp_path / "mixed" / name), other)
    spoil(tmp_path / "mixed")
    with pytest.raises(ValueError, match="shape") as caught:
        call(tmp_path / "mixed")
    assert "\n" not in str(caught.value)


def test_another_shape_than_the_config_says_is_refused_before_weights_are_read(tmp_path):
    folder = save_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 160}))
    spoil(folder)
    with pytest.raises(ValueError, match="shape") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
