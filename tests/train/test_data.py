"""Prompts for training, and the corpus of a target's answers to them."""

import json
import re
import warnings

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from support.tiny import DENSE, HYBRID, SLIDING, make_model, make_tokenizer, plain_tokens

from mlx_dflash2.evaluation.prompts import Chat, encode
from mlx_dflash2.train import data, prompts
from mlx_dflash2.train.corpus import Corpus, Text, write_shard
from mlx_dflash2.train.data import missing_texts, write_answers
from mlx_dflash2.train.prompts import GRAMMAR, Grammar, built_in, read

SETTINGS = dict(name="tiny", max_tokens=6, progress=False)


def _text(row: Chat) -> str:
    return row.messages[0]["content"]


def _normal(value: str) -> str:
    return re.sub(r"^(a|an|the) ", "", value.lower())


# Prompts.


def test_splits_share_no_template_and_no_topic():
    train, held_out = Grammar("train"), Grammar("held_out")
    shared = json.loads(GRAMMAR.read_text())
    for kind in train.templates:
        assert len(train.templates[kind]) >= 10 and len(held_out.templates[kind]) >= 3
    seen = {text for templates in train.templates.values() for text in templates}
    assert seen.isdisjoint(text for texts in held_out.templates.values() for text in texts)
    assert len(train.slots["topic"]) + len(held_out.slots["topic"]) >= 300
    # Nor is a topic of one split a part of one of the other's.
    topics = set(shared["slots"]) - {"passage", "draft", "record", "snippet"}
    pools = [
        [_normal(value) for slot in topics for value in split.slots[slot]]
        for split in (train, held_out)
    ]
    text = "\n".join(pools[0])
    for value in pools[1]:
        assert not re.search(rf"\b{re.escape(value)}\b", text), value
    text = "\n".join(pools[1])
    for value in pools[0]:
        assert not re.search(rf"\b{re.escape(value)}\b", text), value
    for slot in ("passage", "draft", "record", "snippet"):
        assert set(train.slots[slot]).isdisjoint(held_out.slots[slot])


def test_no_train_prompt_has_the_wording_of_a_held_out_template():
    field = re.compile(r"\{[a-z]+\d?\}")
    wordings = [
        re.compile(".+?".join(map(re.escape, field.split(template))), re.DOTALL)
        for templates in Grammar("held_out").templates.values()
        for template in templates
    ]
    for row in built_in("train", 0, 440):
        assert not any(wording.fullmatch(_text(row)) for wording in wordings), _text(row)


@pytest.mark.parametrize("split", prompts.SPLITS)
def test_built_in_prompts_are_balanced_different_and_filled(split):
    rows = built_in(split, 0, 400)
    kinds = [row.suite for row in rows]
    assert kinds[:11] == list(Grammar(split).templates) and kinds[11:22] == kinds[:11]
    texts = [_text(row) for row in rows]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if re.search(r"\{[a-z]+\d?\}", text)]


def test_built_in_prompts_depend_on_the_seed_alone():
    rows = built_in("train", 3, 60)
    assert rows == built_in("train", 3, 60) == built_in("train", 3, 90)[:60]
    others = {_text(row) for row in built_in("train", 4, 60)}
    assert len(others & {_text(row) for row in rows}) < 10


def test_a_count_beyond_what_there_is_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "grammar.json"
    templates = {"a": ["x {t} {t2}"], "b": ["{t}", "{n}!"]}
    content = {
        "ranges": {"n": [1, 2]},
        "shared": {},
        "slots": {"t": {"train": ["p", "q", "{n}"], "held_out": []}},
        "templates": {kind: {"train": found, "held_out": []} for kind, found in templates.items()},
    }
    file.write_text(json.dumps(content))
    monkeypatch.setattr(prompts, "GRAMMAR", file)
    # Of `a` there are at least 3 · 2 texts, of `b` 4 + 2.
    rows = built_in("train", 0, 12)
    assert len({_text(row) for row in rows}) == 12
    for count in (0, 13):
        with pytest.raises(ValueError, match=f"`count` is {count} but has to be from 1 to 12"):
            built_in("train", 0, count)
    with pytest.raises(ValueError, match="`split` is 'test' but has to be one of train, held_out"):
        built_in("test", 0, 1)


def test_prompts_of_files(tmp_path):
    plain, rows = tmp_path / "notes.txt", tmp_path / "rows.jsonl"
    plain.write_text("one\n\n  two  \n")
    assert [(row.suite, _text(row)) for row in read(plain)] == [("notes", "one"), ("notes", "two")]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [json.dumps({"suite": "odd", "messages": chat}), "", json.dumps({"prompt": "p"})]
    rows.write_text("\n".join(lines))
    found = read(rows)
    assert found[0] == ("odd", chat) and (found[1].suite, _text(found[1])) == ("rows", "p")
    rows.write_text('{"prompt": "p"}\n{"text": "p"}\n')
    with pytest.raises(ValueError, match="line 2 has neither"):
        read(rows)
    plain.write_text("\n \n")
    with pytest.raises(ValueError, match="does not hold prompts"):
        read(plain)
    with pytest.raises(FileNotFoundError, match="no file of prompts"):
        read(tmp_path / "gsm8k")


# Shards.


def _texts() -> list[Text]:
    return [Text(np.array([5, 6, 7]), 2, "chat"), Text(np.array([70000, 1]), 1, "code")]


def test_a_corpus_is_what_was_written(tmp_path):
    write_shard(tmp_path / "shard-00000.npz", _texts())
    write_shard(tmp_path / "shard-00001.npz", _texts()[:1])
    corpus = Corpus(tmp_path)
    assert [text.tokens.tolist() for text in corpus] == [[5, 6, 7], [70000, 1], [5, 6, 7]]
    assert [text.prompt_length for text in corpus] == [2, 1, 2]
    assert [text.kind for text in corpus] == ["chat", "code", "chat"]
    assert corpus.num_answer_tokens == 3
    assert len(Corpus(tmp_path / "shard-00001.npz")) == 1
    with pytest.raises(FileNotFoundError, match=r"not hold a \*.npz shard"):
        Corpus(tmp_path / "none")


GOOD = dict(tokens=[1, 2, 3], lengths=[2, 1], prompt_lengths=[1, 1])
BAD = {
    "missing": ({"lengths": None}, "has no `lengths`"),
    "floats": ({"tokens": [1.0, 2.0, 3.0]}, "`tokens` of .* is not a list of integers"),
    "nested": ({"tokens": [[1, 2, 3]]}, "`tokens` of .* is not a list of integers"),
    "sum": ({"lengths": [2, 2]}, "do not add up to its 3 tokens"),
    "counts": ({"prompt_lengths": [1]}, "do not add up"),
    "long prompt": ({"prompt_lengths": [1, 2]}, "a prompt longer than its text"),
    "no prompt": ({"prompt_lengths": [0, 1]}, "negative id, or a prompt"),
    "negative": ({"tokens": [1, -2, 3]}, "negative id"),
    "kinds": ({"kinds": ["chat"]}, "`kinds` of .* are 1, its texts 2"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_malformed_shards_are_refused(tmp_path, changes, message):
    file = tmp_path / "shard-00000.npz"
    fields = {name: value for name, value in (GOOD | changes).items() if value is not None}
    np.savez(file, **fields)
    with pytest.raises(ValueError, match=message):
        Corpus(file)


@pytest.mark.parametrize("keep", [0, 7, 200])
def test_truncated_shards_are_refused(tmp_path, keep):
    file = tmp_path / "shard-00000.npz"
    write_shard(file, _texts())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is not a shard of texts"):
        Corpus(tmp_path)


# Generation.


def _rows(*lengths: int) -> list[Chat]:
    """A prompt of each length, in words of the tiny tokenizer."""
    rng = np.random.default_rng(0)
    return [
        Chat(f"kind{i}", [{"role": "user", "content": " ".join(f"w{t}" for t in tokens)}])
        for i, tokens in enumerate(rng.integers(1, 500, length) for length in lengths)
    ]


def generate(model, tokenizer, chats, folder, **options) -> Corpus:
    return write_answers(model, tokenizer, encode(chats, tokenizer), folder, **options)


def _answers(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    return [
        (text.tokens[: text.prompt_length].tolist(), text.tokens[text.prompt_length :].tolist())
        for text in corpus
    ]


def _shards(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_greedy_answers_are_those_of_mlx_lm(tmp_path, kind):
    model = make_model(kind)
    rows = _rows(9, 3, 5, 30, 4)
    corpus = generate(
        model, make_tokenizer(), rows, tmp_path, batch_size=3, shard_size=4, **SETTINGS
    )
    assert [text.prompt_length for text in corpus] == [3, 4, 5, 9, 30]
    assert [text.kind for text in corpus] == ["kind1", "kind4", "kind2", "kind0", "kind3"]
    assert [len(text.tokens) - text.prompt_length for text in corpus] == [6] * 5
    for prompt, answer in _answers(corpus):
        assert answer == plain_tokens(model, prompt, 6)


def test_the_end_of_sequence_token_is_part_of_the_answer(tmp_path):
    model, rows = make_model(DENSE), _rows(4, 6)
    tokenizer = make_tokenizer()
    prompt = tokenizer.encode(_text(rows[0]))
    tokens = plain_tokens(model, prompt, 6)
    end = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    corpus = generate(model, make_tokenizer(tokens[end]), rows, tmp_path, **SETTINGS)
    assert _answers(corpus)[0] == (prompt, tokens[: end + 1])


def test_finished_shards_are_kept_and_an_interrupted_one_leaves_nothing(tmp_path, monkeypatch):
    model, tokenizer, rows = make_model(DENSE), make_tokenizer(), _rows(3, 4, 5, 6, 7)
    settings = SETTINGS | dict(shard_size=2, temp=1.0, seed=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    generate(model, tokenizer, rows, whole, **settings)
    assert list(_shards(whole)) == ["corpus.json", *(f"shard-0000{i}.npz" for i in range(3))]

    generator = data._generator
    made = []

    def interrupted(*args):
        made.append(generator(*args))
        if len(made) == 2:
            monkeypatch.setattr(made[-1], "next_generated", _interrupt)
        return made[-1]

    monkeypatch.setattr(data, "_generator", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, tokenizer, rows, parts, **settings)
    assert list(_shards(parts)) == ["corpus.json", "shard-00000.npz"]
    first = (parts / "shard-00000.npz").stat().st_mtime_ns
    generate(model, tokenizer, rows, parts, **settings)
    assert len(made) == 4 and (parts / "shard-00000.npz").stat().st_mtime_ns == first
    assert _answers(Corpus(parts)) == _answers(Corpus(whole))
    generate(model, tokenizer, rows, parts, **settings)
    assert len(made) == 4


def _interrupt():
    raise KeyboardInterrupt


def test_sampled_answers_depend_on_the_seed_and_follow_the_sampler(tmp_path):
    model, tokenizer, rows = make_model(DENSE), make_tokenizer(), _rows(3, 4, 5)
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        corpus = generate(model, tokenizer, rows, tmp_path / name, temp=1.0, seed=seed, **SETTINGS)
        found.append(_answers(corpus))
        mx.random.uniform()
    assert found[0] == found[1] != found[2]
    # So small a nucleus holds the likeliest token alone.
    corpus = generate(model, tokenizer, rows, tmp_path / "d", temp=1.0, top_p=1e-4, **SETTINGS)
    sampler = make_sampler(temp=0.0)
    for prompt, answer in _answers(corpus):
        steps = generate_step(mx.array(prompt), model, max_tokens=6, sampler=sampler)
        assert answer == [token for token, _ in steps]


def test_sampled_answers_are_of_one_batch_size(tmp_path):
    """Which answers share a batch decides what is drawn."""
    options = make_model(DENSE), make_tokenizer(), _rows(3, 4, 5), tmp_path
    generate(*options, temp=1.0, batch_size=2, **SETTINGS)
    with pytest.raises(ValueError, match=r"^`batch_size` is 3 but .* was made with 2; [^\n]*$"):
        generate(*options, temp=1.0, batch_size=3, **SETTINGS)


def test_missing_texts_are_counted(tmp_path):
    settings = SETTINGS | dict(shard_size=2)
    generate(make_model(DENSE), make_tokenizer(), _rows(3, 4, 5), tmp_path, **settings)
    assert missing_texts(tmp_path) == 0
    (tmp_path / "shard-00001.npz").unlink()
    assert missing_texts(tmp_path) == 1


CHANGES = {
    "model": dict(name="other"),
    "max_tokens": dict(max_tokens=7),
    "max_seq_length": dict(max_seq_length=99),
    "temp": dict(temp=0.5),
    "top_p": dict(top_p=0.5),
    "seed": dict(seed=1),
    "shard_size": dict(shard_size=3),
}


def test_a_folder_of_other_settings_is_refused(tmp_path):
    model, tokenizer, rows = make_model(DENSE), make_tokenizer(), _rows(3, 4)
    generate(model, tokenizer, rows, tmp_path, **SETTINGS)
    before = _shards(tmp_path)
    for field, change in CHANGES.items():
        new = re.escape(repr(next(iter(change.values()))))
        with pytest.raises(ValueError, match=rf"`{field}` is {new} but .* was made with .*folder"):
            generate(model, tokenizer, rows, tmp_path, **SETTINGS | change)
    with pytest.raises(ValueError, match=r"`prompts` is '.*' but .* was made with '.*'"):
        generate(model, tokenizer, rows[:1], tmp_path, **SETTINGS)
    assert _shards(tmp_path) == before
    # How many are written at a time is not a setting of the corpus.
    generate(model, tokenizer, rows, tmp_path, batch_size=1, **SETTINGS)

    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "is not a record: it does not hold"),
    ):
        (tmp_path / "corpus.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            generate(model, tokenizer, rows, tmp_path, **SETTINGS)
    (tmp_path / "corpus.json").unlink()
    with pytest.raises(ValueError, match=r"has shards but no corpus\.json"):
        generate(model, tokenizer, rows, tmp_path, **SETTINGS)


def test_prompts_that_cannot_be_answered_are_counted_and_skipped(tmp_path):
    model, tokenizer, rows = make_model(DENSE), make_tokenizer(), _rows(8, 3, 7, 0, 9)
    settings = SETTINGS | dict(max_seq_length=8)
    message = r"of 5 prompts: 1 empty, 2 without room .*max_seq_length. \(8\)"
    with pytest.warns(UserWarning, match=message) as caught:
        corpus = generate(model, tokenizer, rows, tmp_path / "a", **settings)
    assert len(caught) == 1
    # Answers end where the text is as long as it may be.
    assert [(text.prompt_length, len(text.tokens)) for text in corpus] == [(3, 8), (7, 8)]
    with pytest.raises(ValueError, match="None of 2 prompts can be answered: 1 empty, 1 without"):
        generate(model, tokenizer, rows[3:], tmp_path / "b", **settings)
    with pytest.raises(ValueError, match="no prompts to answer"):
        generate(model, tokenizer, [], tmp_path / "b", **settings)
    assert not (tmp_path / "b").exists()


def test_progress_tells_tokens_and_disk(tmp_path, capsys):
    rows = _rows(3, 4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = SETTINGS | dict(progress=True, shard_size=2)
        generate(make_model(DENSE), make_tokenizer(), rows, tmp_path, **settings)
    shown = capsys.readouterr().err
    first = "3 prompts in 2 shards, 0 of them written; at most 30 tokens, about 60.0B on disk"
    assert shown.splitlines()[0] == first
    assert re.search(r"3/3 .*tok/s, about .* on disk", shown)
