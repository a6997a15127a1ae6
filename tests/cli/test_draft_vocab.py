"""`--draft-vocab`: which tokens a number or a file stands for."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.saved_models import save_target
from transformers import AutoTokenizer

from mlx_dflash2.cli.draft_vocab import frequent_tokens, merge_order


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("target") / "target")
    return TokenizerWrapper(AutoTokenizer.from_pretrained(folder))


def test_symbols_come_first_and_then_what_was_merged_first(tokenizer):
    order = merge_order(tokenizer)
    assert sorted(order) == list(range(508)) and set(order[:256]) == set(range(256))
    assert tokenizer.convert_ids_to_tokens(order[256:259]) == ["aa", "ab", "ac"]


def test_a_number_takes_the_first_and_the_end_of_text(tokenizer, capsys):
    found = frequent_tokens("300", tokenizer)
    assert found.ids == sorted([*merge_order(tokenizer)[:300], *tokenizer.eos_token_ids])
    line = capsys.readouterr().err
    assert line.startswith("--draft-vocab: 301 tokens, ")
    assert line.endswith("% of those in the built-in prompts.\n")


@pytest.mark.parametrize("text", ["7 9\n12\n", "[7, 9,12]", "7,9,12"])
def test_a_file_of_ids(tokenizer, tmp_path, text):
    (tmp_path / "ids").write_text(text)
    found = frequent_tokens(str(tmp_path / "ids"), tokenizer)
    assert set(found.ids) == {7, 9, 12, *tokenizer.eos_token_ids}


@pytest.mark.parametrize(
    "text, message",
    [("7 x 9", "holds 'x' but has to hold token ids"), ("", "at least one id"),
     (None, "has to be a number or a file of ids")],
)  # fmt: skip
def test_what_is_refused(tokenizer, tmp_path, text, message):
    if text is not None:
        (tmp_path / "ids").write_text(text)
    with pytest.raises(ValueError, match=message):
        frequent_tokens(str(tmp_path / "ids"), tokenizer)
    with pytest.raises(ValueError, match="at least one id"):
        frequent_tokens("0", tokenizer)


def test_a_tokenizer_without_merges_is_refused():
    with pytest.raises(ValueError, match="--draft-vocab N needs a BPE tokenizer"):
        merge_order(object())
