"""Everything that a drafter's config.json says, read by one set of rules."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlx_lm.models.base import BaseModelArgs

from .fields import Fields, architectures, is_integer, refuse, section
from .rope import FULL, SLIDING, rope_parameters
from .speculators import from_speculators, is_speculators

GENERATIONS = {
    "DFlash2DraftModel": 2,
    "DFlashDraftModel": 1,
    "Qwen3DFlashDraftModel": 1,
    "MuseGlimmerAssistantModel": 1,
}
# Fields that the configs of one architecture leave out.
_UNSTATED = {"MuseGlimmerAssistantModel": {"vocab_size": 202048, "is_causal": False}}
# Largest values that are still plausible, so that a typo is an error and not a crash.
_SIZES = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 256,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "vocab_size": 2**24,
}
_MAX_BLOCK, _MAX_TARGET_LAYERS, _MAX_CONV, _MAX_RANK = 1024, 4096, 64, 2**16


@dataclass
class DrafterArgs(BaseModelArgs):
    """Shape and behavior of a DFlash drafter.

    ``layer_types``, ``rope_parameters`` and ``causal`` have one entry for each layer: whether it
    slides, how it rotates, and whether a row of a block sees only rows up to itself. A
    ``target_hidden_size`` of 0 is the drafter's own.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    target_layer_ids: list[int]
    mask_token_id: int
    num_target_layers: int
    layer_types: list[str]
    causal: list[bool]
    rope_parameters: list[dict[str, Any]]
    generation: int = 2
    sliding_window: int | None = None
    target_hidden_size: int = 0
    num_target_layers_declared: bool = True
    rope_traditional: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_vocab_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    quantization: dict[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "DrafterArgs":
        """Read a published DFlash 1, DFlash 2 or speculators config.

        Raises:
            ValueError: naming the field, the value found and what is allowed.
        """
        config = from_speculators(params) if is_speculators(params) else params
        config = {name: value for name, value in config.items() if value is not None}
        for name in architectures(config):
            config = _UNSTATED.get(name, {}) | config
        fields = Fields(config)
        generation = _generation(config)
        _refuse_other_families(fields)
        values = _shape_fields(fields)
        values |= _block_fields(fields, values["num_hidden_layers"])
        values |= _layer_fields(fields, values["num_hidden_layers"], values["head_dim"])
        values |= _generation_fields(fields, values, generation)
        values |= _transform_fields(fields)
        return cls(**values, generation=generation, quantization=_quantization(config))

    def __post_init__(self) -> None:
        if not self.target_hidden_size:
            self.target_hidden_size = self.hidden_size

    @property
    def has_conv(self) -> bool:
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def context_size(self) -> int | None:
        """Rows of context that the layer with the largest window reads; ``None`` for all."""
        if self.sliding_window is None or FULL in self.layer_types:
            return None
        return self.sliding_window - 1


def _generation(config: dict[str, Any]) -> int:
    for name in architectures(config):
        if name in GENERATIONS:
            return GENERATIONS[name]
    refuse("architectures", config.get("architectures"), "one of " + ", ".join(GENERATIONS))


def _refuse_other_families(fields: Fields) -> None:
    """Refuse fields that another kind of drafter needs, or that change the computation."""
    for name, neutral in (
        ("projector_type", (None,)),
        ("markov_rank", (0,)),
        ("sample_from_anchor", (False,)),
        ("attention_sink_bias", (False,)),
        ("attention_value_scale", (1.0,)),
        ("backbone_rotary_base", (None,)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
        ("partial_rotary_factor", (1.0,)),
        ("hidden_act", ("silu", "swish")),
    ):
        value = fields.get(name, neutral[0])
        if value not in neutral:
            plain = "" if neutral[0] is None else f"{neutral[0]!r} or "
            refuse(name, value, f"{plain}absent: a drafter of another family")
    size, full = fields.get("draft_vocab_size"), fields.get("vocab_size")
    if size is not None and size != full:
        refuse("draft_vocab_size", size, f"vocab_size {full}: no reduced vocabulary is supported")


def _shape_fields(fields: Fields) -> dict[str, Any]:
    for name in (*_SIZES, "rms_norm_eps"):
        fields.required(name)
    values = {name: fields.integer(name, 1, most) for name, most in _SIZES.items()}
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if values["head_dim"] % 2 or values["head_dim"] < 4:
        refuse("head_dim", values["head_dim"], "an even number from 4 on")
    positions = fields.integer("max_position_embeddings", 1, 2**31 - 1, 32768)
    hidden = fields.integer("target_hidden_size", 1, _SIZES["hidden_size"], values["hidden_size"])
    return values | {
        "rms_norm_eps": fields.positive("rms_norm_eps"),
        "max_position_embeddings": positions,
        "target_hidden_size": hidden,
    }


def _block_fields(fields: Fields, num_layers: int) -> dict[str, Any]:
    ids = fields.get("target_layer_ids")
    depth = fields.integer("num_target_layers", 1, _MAX_TARGET_LAYERS)
    if ids is None:
        if depth is None:
            refuse("target_layer_ids", None, "given, or num_target_layers")
        ids = default_target_layer_ids(num_layers, depth)
    most = (depth or _MAX_TARGET_LAYERS) - 1
    listed = isinstance(ids, list) and ids and all(is_integer(i, 0, most) for i in ids)
    if not listed or any(a >= b for a, b in pairwise(ids)):
        refuse("target_layer_ids", ids, f"a list of increasing layer numbers from 0 to {most}")
    fields.required("mask_token_id")
    return {
        # A block of one is the anchor alone, after which nothing can be drafted.
        "block_size": fields.integer("block_size", 2, _MAX_BLOCK, 16),
        "target_layer_ids": list(ids),
        "mask_token_id": fields.integer("mask_token_id", 0, _SIZES["vocab_size"] - 1),
        "num_target_layers": ids[-1] + 1 if depth is None else depth,
        "num_target_layers_declared": depth is not None,
    }


def default_target_layer_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """Return the taps that trainers choose where a config lists none."""
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + i * step) for i in range(num_layers)]


def _layer_fields(fields: Fields, num_layers: int, head_dim: int) -> dict[str, Any]:
    name, layer_types = fields.first("layer_types", "dflash_config.layer_types")
    use_swa = fields.flag("use_swa", False) and layer_types is None
    if layer_types is None:
        layer_types = [SLIDING if use_swa else FULL] * num_layers
    known = isinstance(layer_types, list) and all(kind in (SLIDING, FULL) for kind in layer_types)
    if not known or len(layer_types) != num_layers:
        refuse(name, layer_types, f"{num_layers} times {SLIDING!r} or {FULL!r}, one a layer")
    name, window = fields.first(
        "sliding_window",
        "dflash_config.swa_window_size",
        "dflash_config.sliding_window",
        "swa_window_size",
    )
    if SLIDING in layer_types and not is_integer(window, 2):
        refuse(name, window, "an integer from 2 on, for the sliding layers")
    # Rotations are the same for all layers of a kind.
    ropes = {kind: rope_parameters(fields, kind, head_dim) for kind in set(layer_types)}
    _, neox = fields.first("rope_is_neox_style", "is_neox_style")
    if neox is not None and not isinstance(neox, bool):
        refuse("rope_is_neox_style", neox, "true or false")
    return {
        "layer_types": list(layer_types),
        "sliding_window": window if SLIDING in layer_types else None,
        "causal": _causal(fields, layer_types, use_swa),
        "rope_parameters": [ropes[kind] for kind in layer_types],
        "rope_traditional": neox is False,
    }


def _causal(fields: Fields, layer_types: list[str], use_swa: bool) -> list[bool]:
    name, value = fields.first(
        "is_causal",
        "dflash_config.causal",
        "dflash_config.is_causal",
        "dflash_query_causal",
    )
    if value is not None and not isinstance(value, bool):
        refuse(name, value, "true, false or absent")
    if value is not None:
        return [value] * len(layer_types)
    # Drafters that predate the field: their sliding layers were trained causal.
    return [kind == SLIDING and not use_swa for kind in layer_types]


def _generation_fields(fields: Fields, shape: dict[str, Any], generation: int) -> dict[str, Any]:
    """Read convolution and selector, which DFlash 2 drafters have and DFlash 1 drafters lack."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    values = {
        "conv_kernel_size": fields.integer("conv_kernel_size", 0, _MAX_CONV, 0),
        "conv_group_size": fields.integer("conv_group_size", 0, _SIZES["hidden_size"], 16),
        "selector_rank": fields.integer("selector_rank", 0, _MAX_RANK, 0),
        "selector_top_k": fields.integer("selector_top_k", 0, vocab, 0),
        "selector_vocab_size": fields.integer("selector_vocab_size", 1, vocab),
    }
    group, top_k = values["conv_group_size"], values["selector_top_k"]
    if generation == 1:
        for name in ("selector_rank", "conv_kernel_size"):
            if values[name]:
                refuse(name, values[name], "absent or 0 for a DFlash 1 architecture")
        return values
    if values["conv_kernel_size"] and (group == 0 or hidden % group):
        refuse("conv_group_size", group, f"a divisor of hidden_size {hidden}")
    for name in ("selector_rank", "selector_top_k"):
        if not values[name]:
            refuse(name, values[name], "1 or more for a DFlash 2 architecture")
    most = values["selector_vocab_size"] or vocab
    if top_k > most:
        refuse("selector_top_k", top_k, f"at most selector_vocab_size {most}")
    return values


def _transform_fields(fields: Fields) -> dict[str, Any]:
    softcap = fields.get("final_logit_softcapping")
    off = isinstance(softcap, int | float) and not isinstance(softcap, bool) and softcap <= 0
    return {
        "input_embedding_scale": fields.positive("input_embedding_scale", 1.0),
        "output_multiplier": fields.positive("output_multiplier", 1.0),
        "final_logit_softcapping": None if off else fields.positive("final_logit_softcapping"),
    }


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """Read MLX's own description; refuse other formats, whose weights would be refused, too."""
    for name in ("quantization_config", "compression_config", "quantization"):
        method = section(config, name).get("quant_method")
        if method is not None:
            refuse(f"{name}.quant_method", method, "absent: only MLX's quantization is read")
    section_found = section(config, "quantization") or section(config, "quantization_config")
    return section_found or None
