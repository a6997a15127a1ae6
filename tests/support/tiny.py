"""Tiny random models of every supported kind, a drafter for them, and their cache states."""

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter

VOCAB, HIDDEN = 512, 64

_SIZES = dict(
    hidden_size=HIDDEN, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, vocab_size=VOCAB,
)  # fmt: skip
_PLAIN = _SIZES | dict(
    rms_norm_eps=1e-6, max_position_embeddings=4096, tie_word_embeddings=True
)  # fmt: skip
_DENSE = _PLAIN | dict(rope_theta=10000.0)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
_HYBRID = _PLAIN | dict(
    full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
)  # fmt: skip
_ROPE = {"rope_parameters": {"type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25}}
_GEMMA4 = _SIZES | dict(
    global_head_dim=32, sliding_window=16, sliding_window_pattern=2, num_kv_shared_layers=0,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
)  # fmt: skip

CONFIGS = {
    "qwen3": _DENSE,
    "qwen3-untied": _DENSE | dict(tie_word_embeddings=False),
    "qwen3-vocab32": _DENSE | dict(vocab_size=32),
    "qwen2": _DENSE,
    "qwen3_moe": _DENSE | _MOE | dict(decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen2_moe": _DENSE | _MOE | dict(shared_expert_intermediate_size=32),
    "llama": _DENSE,
    "llama-sliding": _DENSE
    | dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16)
    | dict(num_hidden_layers=4),
    "mixtral": _DENSE | dict(num_local_experts=4, num_experts_per_tok=2),
    "phi3": _DENSE,
    "olmo2": _DENSE,
    "glm4": _DENSE | dict(attention_bias=False, partial_rotary_factor=0.5),
    "seed_oss": _DENSE | dict(tie_word_embeddings=False),
    "ernie4_5": _DENSE | dict(use_bias=False),
    "hunyuan_v1_dense": _DENSE | dict(rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "d"}),
    "qwen3_5": dict(text_config=_HYBRID | _ROPE),
    "qwen3_5-conv2": dict(text_config=_HYBRID | _ROPE | dict(linear_conv_kernel_dim=2)),
    "qwen3_5-sparse": dict(text_config=_HYBRID | _ROPE | dict(full_attention_interval=4)),
    "qwen3_5_moe": dict(
        text_config=_HYBRID | _ROPE | _MOE | dict(shared_expert_intermediate_size=32)
    ),
    "qwen3_next": _HYBRID
    | _MOE
    | dict(decoder_sparse_step=2, mlp_only_layers=[], shared_expert_intermediate_size=32)
    | dict(rope_theta=1e5, partial_rotary_factor=0.25),
    "muse_glimmer": _DENSE
    | dict(sliding_window=16, tie_word_embeddings=False),
    "gemma3_text": _DENSE | dict(sliding_window=16, sliding_window_pattern=2)
    | dict(query_pre_attn_scalar=32),
    "gemma4": dict(text_config=_GEMMA4, vocab_size=VOCAB),
    "gemma4_text-shared": _GEMMA4 | dict(num_kv_shared_layers=2),
    "gemma4_text-inputs": _GEMMA4 | dict(hidden_size_per_layer_input=32),
    "gpt_oss": _DENSE | dict(sliding_window=16, num_local_experts=4)
    | dict(experts_per_token=2, num_experts_per_tok=2, rope_scaling=None),
}  # fmt: skip

DENSE, HYBRID, SLIDING = "qwen3", "qwen3_5", "muse_glimmer"


def make_model(kind: str, dtype: mx.Dtype = mx.float32, bits: int | None = None, seed: int = 0):
    """A random model of a kind in ``CONFIGS``; its head tells tokens apart clearly."""
    name = kind.split("-")[0]
    arch = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict({"model_type": name} | CONFIGS[kind]))
    weights = []
    for path, value in tree_flatten(model.parameters()):
        if value.ndim > 1 and "conv1d" not in path:
            value = mx.random.normal(value.shape) * (value.shape[-1] ** -0.5)
        elif path.endswith(("norm.weight", "layernorm.weight")):
            value = value + 0.1 * mx.random.normal(value.shape)
        weights.append((path, value.astype(dtype)))
    model.load_weights(weights)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def cache_arrays(prompt_cache) -> list:
    """Every array of the caches' live content, in a comparable order."""
    arrays = []
    for cache in prompt_cache:
        live = cache.keys_and_values() if hasattr(cache, "keys_and_values") else cache.state
        arrays += [value for _, value in tree_flatten(live) if isinstance(value, mx.array)]
    return arrays


def plain_tokens(model, prompt: list[int], max_tokens: int) -> list[int]:
    """What mlx-lm itself generates greedily."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [token for token, _ in steps]


def make_tokenizer(eos: int | None = None, chat_template: str | None = None):
    """A word-level tokenizer of the tiny vocabulary: token i is the word " wi"."""
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)
    return TokenizerWrapper(fast, eos_token_ids=[-1 if eos is None else eos])


def random_drafter(config: dict) -> Drafter:
    """A drafter of a config whose every matrix is random."""
    drafter = Drafter(DrafterArgs.from_dict(config))
    weights = []
    for path, value in tree_flatten(drafter.parameters()):
        if path.endswith("base_kernel"):
            value = value + 0.2 * mx.random.normal(value.shape)
        elif value.ndim > 1:
            value = mx.random.normal(value.shape) * (value.shape[-1] ** -0.5)
        weights.append((path, value))
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    return drafter


def make_drafter(window: int | None = 16, vocab_size: int = VOCAB, **changes) -> Drafter:
    """A random drafter of ``drafter_config``."""
    return random_drafter(drafter_config(window, vocab_size, **changes))


def drafter_config(window: int | None = 16, vocab_size: int = VOCAB, **changes) -> dict:
    """The config.json of a DFlash 2 drafter for the tiny targets of four layers.

    All of its layers slide, or none without a window; ``changes`` go to ``dflash_config``.
    """
    layer_type = "full_attention" if window is None else "sliding_attention"
    fields = dict(
        block_size=8, target_layer_ids=[1, 3], mask_token_id=501, conv_kernel_size=2,
        conv_group_size=16, selector_rank=32, selector_top_k=8,
    )  # fmt: skip
    return dict(
        architectures=["DFlash2DraftModel"], model_type="qwen3", hidden_act="silu",
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=128, vocab_size=vocab_size, rms_norm_eps=1e-6,
        max_position_embeddings=4096, num_target_layers=4, is_causal=False,
        layer_types=[layer_type] * 2, sliding_window=window,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        dflash_config=fields | changes,
    )  # fmt: skip
