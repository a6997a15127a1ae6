"""States that a checkpoint folder is met in, and a stand-in for the hub's cache."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from support.drafters import V2, random_weights
from support.saved_models import save_drafter, write_config, write_shards

HASH = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> list[str]:
    return write_shards(write_config(folder, V2), random_weights(V2))


def single(folder: Path) -> Path:
    return save_drafter(folder) / "model.safetensors"


def odd_names(folder: Path):
    for i, file in enumerate(sharded(folder)):
        (folder / file).rename(folder / f"dflash_draft_model-{i}.safetensors")
    (folder / INDEX).unlink()


def byte_order_mark(folder: Path):
    single(folder)
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(V2).encode())


def leftovers(folder: Path):
    single(folder)
    (folder / "model.safetensors.incomplete").write_bytes(b"x")
    (folder / "._model.safetensors").write_bytes(b"macOS")
    (folder / ".cache").mkdir()


def linked(folder: Path):
    single(folder.with_name("store"))
    folder.symlink_to(folder.with_name("store"), target_is_directory=True)


LOADABLE = {
    "one file": single,
    "three shards": sharded,
    "odd shard names": odd_names,
    "byte order mark": byte_order_mark,
    "leftovers": leftovers,
    "linked folder": linked,
}


def lose_shard(folder: Path):
    (folder / sharded(folder)[1]).unlink()


def lose_shard_and_index(folder: Path):
    lose_shard(folder)
    (folder / INDEX).unlink()


def index_text(text: str):
    def make(folder: Path):
        sharded(folder)
        (folder / INDEX).write_text(text)

    return make


def config_bytes(data: bytes):
    def make(folder: Path):
        single(folder)
        (folder / "config.json").write_bytes(data)

    return make


def weight_bytes(change):
    def make(folder: Path):
        file = single(folder)
        file.write_bytes(change(file.read_bytes()))

    return make


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def dangling(folder: Path):
    file = single(folder)
    file.unlink()
    file.symlink_to(folder / "blob-that-never-came")


def twice(folder: Path):
    file = single(folder)
    shutil.copy(file, folder / "copy.safetensors")


def only_incomplete(folder: Path):
    file = single(folder)
    file.rename(folder / "model.safetensors.incomplete")


def config_folder(folder: Path):
    single(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


# name: (make, error, parts of the message)
REFUSED = {
    "shard missing": (lose_shard, FileNotFoundError, ["Incomplete", "model-00002-of-00003"]),
    "shard and index missing": (lose_shard_and_index, ValueError, ["is missing"]),
    "link to nothing": (dangling, FileNotFoundError, ["Incomplete", "model.safetensors"]),
    "only .incomplete": (only_incomplete, FileNotFoundError, ["model.safetensors.incomplete"]),
    "index not JSON": (index_text("{"), ValueError, [INDEX, "JSON"]),
    "index a list": (index_text("[]"), ValueError, [INDEX, "object"]),
    "index without map": (index_text("{}"), ValueError, [INDEX, "weight_map"]),
    "index map a list": (index_text('{"weight_map": [1]}'), ValueError, [INDEX, "weight_map"]),
    "index to numbers": (index_text('{"weight_map": {"a": 1}}'), ValueError, ["weight_map"]),
    "index to pickles": (
        index_text('{"weight_map": {"a": "pytorch_model.bin"}}'),
        ValueError,
        [INDEX, ".safetensors"],
    ),
    "truncated": (weight_bytes(lambda data: data[:-100]), ValueError, ["truncated"]),
    "header truncated": (weight_bytes(lambda data: data[:100]), ValueError, ["truncated"]),
    "zero bytes": (weight_bytes(lambda data: b""), ValueError, ["truncated", "0 bytes"]),
    "seven bytes": (weight_bytes(lambda data: data[:7]), ValueError, ["truncated"]),
    "an LFS pointer": (weight_bytes(lambda data: b"version https://git-lfs"), ValueError, ["not"]),
    "header not JSON": (weight_bytes(lambda data: header("{x")), ValueError, ["header"]),
    "header a list": (weight_bytes(lambda data: header("[]")), ValueError, ["header"]),
    "header of texts": (weight_bytes(lambda data: header('{"a": "b"}')), ValueError, ["header"]),
    "header without offsets": (
        weight_bytes(lambda data: header('{"a": {"dtype": "F32", "shape": [1]}}')),
        ValueError,
        ["header"],
    ),
    "no tensors": (weight_bytes(lambda data: header("{}")), ValueError, ["is missing"]),
    "a tensor twice": (twice, ValueError, ["twice", "copy.safetensors"]),
    "empty": (Path.mkdir, FileNotFoundError, ["config.json"]),
    "only config": (lambda f: write_config(f, V2), FileNotFoundError, ["no weights"]),
    "a file": (Path.touch, NotADirectoryError, ["is a file"]),
    "config a folder": (config_folder, FileNotFoundError, ["config.json"]),
    "config empty": (config_bytes(b""), ValueError, ["config.json", "JSON"]),
    "config not JSON": (config_bytes(b"{'a': 1}"), ValueError, ["config.json", "JSON"]),
    "config not text": (config_bytes(b"\xff\xfe\x00"), ValueError, ["config.json", "JSON"]),
    "config a list": (config_bytes(b"[]"), ValueError, ["config.json", "object"]),
    "config too deep": (config_bytes(b'{"a":' * 99999), ValueError, ["config.json"]),
}


def spoil(folder):
    """Leave the headers whole and make every number a NaN, so that none can be of use."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        start = int.from_bytes(data[:8], "little") + 8
        file.write_bytes(data[:start] + b"\xff" * (len(data) - start))


@contextmanager
def no_weights_read():
    """Fail the test if MLX reads a file of weights inside the block."""

    def read(file, *_, **__):
        pytest.fail(f"the weights of {file} were read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "load", read)
        yield


def refused(error: type[Exception], call, *args, **kwargs) -> str:
    """The message of a refusal: one line, before any weight is read."""
    with no_weights_read(), pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def publish(cache: Path, repo: str, folder: Path):
    """Lay a folder out as the hub's cache holds a downloaded repository."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / HASH
    for part in (snapshot, root / "blobs", root / "refs"):
        part.mkdir(parents=True)
    (root / "refs" / "main").write_text(HASH)
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, root / "blobs" / f"blob{i}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"blob{i}"))
    return snapshot


def same(first, second) -> bool:
    pairs = zip(tree_flatten(first.parameters()), tree_flatten(second.parameters()), strict=True)
    return all(a[0] == b[0] and mx.array_equal(a[1], b[1]).item() for a, b in pairs)
