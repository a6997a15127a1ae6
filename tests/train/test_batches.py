"""Which texts and anchors a step trains on, and what the target shows of them."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import DENSE, HYBRID, VOCAB, make_model
from support.training import NoTaps, random_corpus

from mlx_dflash2.targets import bind
from mlx_dflash2.train import taps as taps_module
from mlx_dflash2.train.batches import Batches
from mlx_dflash2.train.taps import CachedTaps, ComputedTaps, write_taps

LENGTHS = [12, 30, 9, 25, 14, 21, 17, 28]
PROMPTS = [3, 10, 1, 20, 5, 4, 16, 6]
LAYERS = [0, 2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("texts"), LENGTHS, PROMPTS)


def make_batches(corpus, source=None, texts=None, **changes) -> Batches:
    options = dict(batch_size=2, anchors=6, max_seq_length=64, seed=3) | changes
    texts = range(len(corpus)) if texts is None else texts
    return Batches(corpus, source or NoTaps(), texts, **options)


def everything(batch) -> list:
    return [None if array is None else array.tolist() for array in batch]


def test_a_batch_is_a_function_of_seed_and_number(corpus):
    """In whatever order batches are asked for."""
    one, other = make_batches(corpus), make_batches(corpus)
    forwards = [everything(one.batch(number)) for number in range(9)]
    backwards = [everything(other.batch(number)) for number in reversed(range(9))]
    assert forwards == backwards[::-1]
    assert forwards != [everything(make_batches(corpus, seed=4).batch(n)) for n in range(9)]


def test_every_text_is_used_once_an_epoch_in_a_new_order(corpus):
    source = NoTaps()
    batches = make_batches(corpus, source, texts=range(6))
    epochs = []
    for epoch in range(3):
        for index in range(batches.per_epoch):
            batches.batch(epoch * batches.per_epoch + index)
        asked, source.asked = source.asked, []
        assert sorted(text for texts in asked for text in texts) == list(range(6))
        epochs.append(asked)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_text_draws_other_anchors_each_epoch(corpus):
    batches = make_batches(corpus, texts=[1, 7], anchors=5)
    drawn = [
        everything(batches.batch(number)._replace(tokens=None, taps=None)) for number in (0, 1)
    ]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("max_seq_length", [64, 22])
@pytest.mark.parametrize("anchors", [1, 6, 100])
def test_anchors_are_different_positions_of_the_answer_with_a_token_after_them(
    corpus, anchors, max_seq_length
):
    source = NoTaps()
    batches = make_batches(corpus, source, anchors=anchors, max_seq_length=max_seq_length)
    seen = {text: set() for text in range(8)}
    for number in range(30 * batches.per_epoch):
        batch = batches.batch(number)
        for row, text in enumerate(source.asked[-1]):
            length = min(LENGTHS[text], max_seq_length)
            assert batch.lengths[row].item() == length
            drawn = np.array(batch.anchors[row])[np.array(batch.used[row])]
            assert len(drawn) == min(anchors, length - 1 - PROMPTS[text])
            assert (np.diff(drawn) > 0).all()
            assert drawn.min() >= PROMPTS[text] and drawn.max() <= length - 2
            seen[text] |= set(drawn.tolist())
    if anchors == 6:
        for text in batches.texts.tolist():
            last = min(LENGTHS[text], max_seq_length) - 1
            assert seen[text] == set(range(PROMPTS[text], last))


def test_anchors_that_fill_up_are_not_used(corpus):
    # Answers of 8 tokens and of one, which can be no anchor's.
    with pytest.raises(ValueError, match=r"^1 texts have an answer .* but a batch takes 2\.$"):
        make_batches(corpus, texts=[2, 6])
    batch = make_batches(corpus, texts=[2, 3], anchors=100).batch(0)
    assert sorted(batch.used.sum(axis=1).tolist()) == [4, 7]
    assert batch.used.tolist() == (batch.anchors > 0).tolist()


def test_tokens_are_the_texts_and_zeros_behind_them(corpus):
    source = NoTaps()
    batches = make_batches(corpus, source, max_seq_length=20)
    for number in range(batches.per_epoch):
        batch = batches.batch(number)
        for row, text in enumerate(source.asked[-1]):
            expected = corpus[text].tokens[:20].tolist()
            filled = expected + [0] * (batch.tokens.shape[1] - len(expected))
            assert batch.tokens[row].tolist() == filled


# Taps.


@pytest.fixture(scope="module")
def targets():
    return {kind: bind(make_model(kind)) for kind in (DENSE, HYBRID)}


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(taps_module, "TEXTS_PER_FILE", 3)


@pytest.mark.parametrize("texts", [8, 6, 2])
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_cached_taps_are_the_computed_ones_in_bfloat16(kind, texts, targets, small_files, tmp_path):
    """In any order of texts, cut or padded, and with zeros behind a text."""
    corpus = random_corpus(tmp_path / "texts", LENGTHS[:texts], PROMPTS[:texts])
    write_taps(targets[kind], corpus, LAYERS, tmp_path / "taps", batch_size=2)
    cached = CachedTaps(tmp_path / "taps", corpus, True)
    computed = ComputedTaps(targets[kind], corpus, LAYERS, True)
    size = sum(file.stat().st_size for file in (tmp_path / "taps").glob("*.bin"))
    assert size == 2 * len(corpus.tokens) * 3 * 64
    for chosen, length in (([texts - 1, 0], 10), ([1, 0], 40)):
        for found, expected in zip(
            cached.read(chosen, length), computed.read(chosen, length), strict=True
        ):
            assert found.shape == expected.shape and found.dtype == mx.bfloat16
            inside = mx.arange(length) < mx.array([LENGTHS[i] for i in chosen])[:, None]
            expected = mx.where(inside[..., None], expected, 0)
            off = mx.abs(found.astype(mx.float32) - expected)
            assert mx.all(off <= 2**-8 * mx.abs(expected) + 1e-5).item()


def test_a_partial_cache_is_completed(targets, corpus, small_files, tmp_path, monkeypatch):
    """Files that are there are left alone; what a broken run left behind is written anew."""
    target = targets[DENSE]
    write_taps(target, corpus, LAYERS, tmp_path)
    whole = [file.read_bytes() for file in sorted(tmp_path.glob("*.bin"))]
    (tmp_path / "taps-00001.bin").rename(tmp_path / "taps-00001.partial")
    rows, read = [], ComputedTaps.read
    monkeypatch.setattr(
        ComputedTaps,
        "read",
        lambda self, texts, length: rows.extend(texts) or read(self, texts, length),
    )
    with pytest.raises(FileNotFoundError):
        CachedTaps(tmp_path, corpus, True)
    write_taps(target, corpus, LAYERS, tmp_path)
    assert sorted(rows) == [3, 4, 5]
    assert [file.read_bytes() for file in sorted(tmp_path.glob("*.bin"))] == whole
    assert not list(tmp_path.glob("*.partial"))


def test_processes_share_the_files_between_them(targets, corpus, small_files, tmp_path):
    for rank in (0, 1):
        write_taps(targets[DENSE], corpus, LAYERS, tmp_path / "both", share=(rank, 2))
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path / "one")
    for file in sorted((tmp_path / "one").glob("*.bin")):
        assert (tmp_path / "both" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("field, changes", [
    ("layers", dict(layers=[0, 3])),
    ("model", dict(model="another")),
    ("dequantize", dict(dequantize=True)),
])  # fmt: skip
def test_a_cache_of_something_else_is_not_gone_on_with(field, changes, targets, corpus, tmp_path):
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path, model="tiny")
    options = dict(layers=LAYERS, model="tiny") | changes
    with pytest.raises(ValueError, match=rf"^`{field}` is .*taps.json was made with [^\n]*$"):
        write_taps(targets[DENSE], corpus, options.pop("layers"), tmp_path, **options)
    assert json.loads((tmp_path / "taps.json").read_text())["model"] == "tiny"


def test_a_cache_of_other_texts_is_refused(targets, corpus, tmp_path):
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path / "taps")
    other = random_corpus(tmp_path / "texts", LENGTHS[:-1], PROMPTS[:-1])
    with pytest.raises(ValueError, match=r"^`texts` is 7 but .* was made with 8; .*$"):
        write_taps(targets[DENSE], other, LAYERS, tmp_path / "taps")
    with pytest.raises(ValueError, match=r"^`texts` is 7 but .* was made with 8; .*$"):
        CachedTaps(tmp_path / "taps", other, False)


def test_a_cache_says_what_it_lacks(targets, corpus, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"^.* does not hold taps; run the taps stage first\.$"
    ):
        CachedTaps(tmp_path / "none", corpus, False)
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path / "taps", final=False)
    assert CachedTaps(tmp_path / "taps", corpus, False).read([0], 5).final is None
    with pytest.raises(ValueError, match=r"^.* was made without the input of the target's head\.$"):
        CachedTaps(tmp_path / "taps", corpus, True)
    for name, value in (("layers", [0, 1]), ("model", "another"), ("dequantize", True)):
        with pytest.raises(ValueError, match=rf"^`{name}` is .* was made with [^\n]*$"):
            CachedTaps(tmp_path / "taps", corpus, False, **{name: value})


def test_a_cache_of_as_many_other_tokens_is_refused(targets, corpus, tmp_path):
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path / "taps")
    shifted, answers = (random_corpus(tmp_path / "texts", LENGTHS, PROMPTS) for _ in range(2))
    shifted.tokens = (shifted.tokens + 1) % VOCAB
    answers.prompt_lengths = answers.prompt_lengths + 1
    for other in (shifted, answers):
        with pytest.raises(ValueError, match=r"^`digest` is .* was made with [^\n]*$"):
            CachedTaps(tmp_path / "taps", other, False)
        with pytest.raises(ValueError, match=r"^`digest` is .* was made with [^\n]*$"):
            write_taps(targets[DENSE], other, LAYERS, tmp_path / "taps")


def test_a_cache_with_the_head_s_rows_serves_without_them(targets, corpus, tmp_path):
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path)
    whole = (tmp_path / "taps-00000.bin").read_bytes()
    (tmp_path / "taps-00000.bin").unlink()
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path, final=False)
    assert (tmp_path / "taps-00000.bin").read_bytes() == whole
    both, taps = (CachedTaps(tmp_path, corpus, final).read([0], 5) for final in (True, False))
    assert taps.final is None and mx.array_equal(both.taps, taps.taps)


@pytest.mark.parametrize("field", ["digest", "dequantize"])
def test_a_cache_without_a_full_record_is_refused(field, targets, corpus, tmp_path):
    write_taps(targets[DENSE], corpus, LAYERS, tmp_path)
    about = json.loads((tmp_path / "taps.json").read_text())
    del about[field]
    (tmp_path / "taps.json").write_text(json.dumps(about))
    message = rf"^.* has no `{field}`; remove [^\n]* and run the taps stage again\.$"
    with pytest.raises(ValueError, match=message):
        CachedTaps(tmp_path, corpus, False)
    with pytest.raises(ValueError, match=message):
        write_taps(targets[DENSE], corpus, LAYERS, tmp_path)


def test_an_epoch_is_ordered_once(corpus, monkeypatch):
    asked, order = [], Batches._draw_order
    monkeypatch.setattr(Batches, "_draw_order", lambda self, n: asked.append(n) or order(self, n))
    batches = make_batches(corpus)
    for number in (0, 1, 2, 3, 4, 5, 0):
        batches.batch(number)
    assert batches.per_epoch == 3 and asked == [0, 1, 0]
