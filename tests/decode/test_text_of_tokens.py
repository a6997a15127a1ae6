"""One answer and a batch of them give the same text for the same tokens."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from support.saved_models import save_target
from support.tiny import VOCAB, make_drafter, make_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mlx_dflash2 import batch_generate, generate

SPM = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def sentence_piece(folder):
    """Every other token begins a word, some are bytes of broken characters."""
    vocabulary = {f"{'▁' if i % 2 else ''}w{i}": i for i in range(VOCAB)}
    names = list(vocabulary)
    names[256:] = [f"<0x{i:02X}>" for i in range(256)]
    model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(SPM)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return load_tokenizer(folder, None, [VOCAB])


def byte_level(folder):
    return load_tokenizer(save_target(folder), None, [VOCAB])


@pytest.mark.parametrize("make", [sentence_piece, byte_level])
@pytest.mark.parametrize("seed", range(4))
def test_same_text(make, seed, tmp_path):
    tokenizer = make(tmp_path / "tokenizer")
    assert isinstance(tokenizer, TokenizerWrapper)
    model, drafter = make_model("qwen3", seed=seed), make_drafter()
    prompts = [[seed + 1, 5], [seed + 2, 7, 9], [301 + seed]]
    found = batch_generate(model, tokenizer, prompts, draft_model=drafter, max_tokens=12).texts
    alone = [
        generate(model, tokenizer, prompt, draft_model=drafter, max_tokens=12) for prompt in prompts
    ]
    assert found == alone
