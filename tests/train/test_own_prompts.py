"""Prompts that the target writes itself."""

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.tiny import DENSE, make_model, make_tokenizer

from mlx_dflash2.train.corpus import Corpus
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.own_prompts import MAX_TOKENS, opening, own_prompts
from mlx_dflash2.train.run import Run

# A user's turn begins behind w7 and ends with w3.
TEMPLATE = (
    "{% for m in messages %}w7 {{ m.content }} w3 w9 {% endfor %}"
    "{% if add_generation_prompt %}w8{% endif %}"
)
HEAD, END = (7,), 3
OPTIONS = dict(name="tiny", seed=1, batch_size=20, shard_size=30, progress=False)


def chat_tokenizer(template: str | None = TEMPLATE, eos: int = END) -> TokenizerWrapper:
    return make_tokenizer(eos, template)


def written(rows) -> list[str]:
    return [row.messages[0]["content"] for row in rows]


def test_the_opening_is_the_chat_up_to_the_users_words():
    assert opening(chat_tokenizer()) == HEAD


@pytest.mark.parametrize("template, eos, message", [
    (None, END, "has no chat template"),
    (TEMPLATE, 9, "does not end a user's turn"),
    ("{% for m in messages %}w7 {{ m.content | upper }} w3 {% endfor %}", END, "does not end"),
    ("{% for m in messages %}w7 {{ m.content }}{% endfor %}", END, "does not end"),
], ids=["no template", "end unknown", "words changed", "no end"])  # fmt: skip
def test_a_template_that_does_not_serve_is_refused(template, eos, message):
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        opening(chat_tokenizer(template, eos))


def test_prompts_are_the_turns_that_end_each_once(tmp_path):
    """A model that likes to end gives short turns, which come again, and empty ones."""
    model, tokenizer = make_model(DENSE), chat_tokenizer()
    rows = own_prompts(model, tokenizer, tmp_path, 20, **OPTIONS)
    texts = list(Corpus(tmp_path))
    assert len(texts) == 20 and {tuple(text.tokens[:1]) for text in texts} == {HEAD}
    turns = [text.tokens[1:].tolist() for text in texts]
    ended = [turn[:-1] for turn in turns if turn[-1] == END]
    assert 0 < len(ended) < 20 and all(END not in turn for turn in ended)
    assert {len(turn) for turn in turns if turn[-1] != END} == {MAX_TOKENS}
    expected = list(dict.fromkeys(" ".join(f"w{token}" for token in turn) for turn in ended))
    assert written(rows) == [text for text in expected if text]
    assert {row.suite for row in rows} == {"own"}
    assert rows == own_prompts(None, tokenizer, tmp_path, 20, **OPTIONS)


def test_turns_that_are_no_users_are_left_out(tmp_path):
    class Eager(type(make_model(DENSE))):
        """Ends a turn at once, or after one of two words, or after a special token."""

        def __call__(self, tokens, *args, **kwargs):
            logits = super().__call__(tokens, *args, **kwargs)
            ids = mx.arange(logits.shape[-1])
            after = tokens[..., None] == HEAD[0]
            likely = mx.where(after, (ids == END) | (abs(ids - 20) < 2), ids == END)
            return mx.where(likely, 0.0, -1e9)

    model = make_model(DENSE)
    model.__class__ = Eager
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["w19"]})
    rows = own_prompts(model, tokenizer, tmp_path, 30, **OPTIONS)
    turns = {tuple(text.tokens[1:].tolist()) for text in Corpus(tmp_path)}
    assert turns == {(END,), (19, END), (20, END), (21, END)}
    assert sorted(written(rows)) == ["w20", "w21"]


def test_no_usable_prompt_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^None of 2 prompts [^\n]* can be used\.$"):
        own_prompts(make_model(DENSE), chat_tokenizer(), tmp_path, 2, **OPTIONS | {"seed": 0})


def test_a_target_without_a_chat_template_is_refused_before_anything_is_written(
    model_folders, tmp_path
):
    places = ["--model", str(model_folders / "raw"), "--output-path", str(tmp_path / "out")]
    run = Run(parse(["data", *places, "--own-prompts", "3"]))
    with pytest.raises(ValueError, match="no chat template"):
        run.check()
    assert not (tmp_path / "out").exists()


def test_own_prompts_beside_texts_that_are_there_are_refused(model_folders, tmp_path):
    places = ["--model", str(model_folders / "target"), "--data", str(tmp_path)]
    run = Run(parse(["data", *places, "--own-prompts", "3", "--output-path", str(tmp_path)]))
    with pytest.raises(ValueError, match=r"^`own_prompts` is 3 but [^\n]*\.$"):
        run.check()


def test_the_data_stage_answers_them_beside_the_others(model_folders, tmp_path):
    places = ["--model", str(model_folders / "target"), "--output-path", str(tmp_path)]
    counts = "--own-prompts 20 --num-prompts 5 --max-tokens 3 --thinking off".split()
    run = Run(parse(["data", *places, *counts]))
    run.check()
    run.data()
    kinds = run.inputs.corpus().kinds.tolist()
    assert kinds.count("own") == len(run.inputs.own_chats()) > 0
    assert len(kinds) == 5 + kinds.count("own")
