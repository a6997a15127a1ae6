"""Everything a drafter's config.json says, read by one set of rules."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlx_lm.models.base import BaseModelArgs

from .speculators import from_speculators, is_speculators

GENERATIONS = {
    "DFlash2DraftModel": 2,
    "DFlashDraftModel": 1,
    "Qwen3DFlashDraftModel": 1,
    "MuseGlimmerAssistantModel": 1,
}
SLIDING, FULL = "sliding_attention", "full_attention"
# Fields that the configs of one architecture leave out.
_UNSTATED = {"MuseGlimmerAssistantModel": {"vocab_size": 202048, "is_causal": False}}


@dataclass
class DrafterArgs(BaseModelArgs):
    """Shape and behaviour of a DFlash drafter.

    ``layer_types``, ``rope_parameters`` and ``causal`` have one entry a layer: whether a layer
    slides, how it rotates, and whether the rows of a block see later rows of it.
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
    target_hidden_size: int | None = None
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
        for name in config.get("architectures") or []:
            config = _UNSTATED.get(name, {}) | config
        _refuse_other_families(config)
        values = {name: _required(config, name) for name in _SHAPE}
        values |= _block_fields(config, values["num_hidden_layers"])
        values |= _layer_fields(config, values["num_hidden_layers"])
        values |= _transform_fields(config)
        args = cls(**values, generation=_generation(config))
        args._check()
        return args

    def __post_init__(self):
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size

    @property
    def has_conv(self) -> bool:
        return self.conv_kernel_size > 0

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def context_size(self) -> int | None:
        """Rows of context that the deepest-seeing layer reads; None when a layer reads all."""
        return self.sliding_window - 1 if FULL not in self.layer_types else None

    def _check(self):
        ids, depth = self.target_layer_ids, self.num_target_layers
        ordered = all(a < b for a, b in pairwise(ids))
        _expect(ids and ordered and ids[0] >= 0 and ids[-1] < depth, "target_layer_ids", ids)(
            f"increasing layer numbers from 0 to {depth - 1}"
        )
        _expect(self.block_size >= 1, "block_size", self.block_size)("1 or more")
        _expect(self.mask_token_id >= 0, "mask_token_id", self.mask_token_id)("a token id")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _expect(heads % kv_heads == 0, "num_key_value_heads", kv_heads)(f"a divisor of {heads}")
        if self.has_conv:
            group = self.conv_group_size
            divides = group > 0 and self.hidden_size % group == 0
            _expect(divides, "conv_group_size", group)(
                f"a divisor of hidden_size {self.hidden_size}"
            )
        if self.generation == 2:
            _expect(self.selector_rank > 0, "selector_rank", self.selector_rank)("1 or more")
            top_k = self.selector_top_k
            _expect(1 <= top_k <= self.vocab_size, "selector_top_k", top_k)("1 to vocab_size")
        else:
            found = {"selector_rank": self.selector_rank, "conv_kernel_size": self.conv_kernel_size}
            for name, value in found.items():
                _expect(not value, name, value)("absent for a DFlash 1 architecture")


_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


def _expect(ok: Any, name: str, found: Any):
    def allowed(text: str):
        if not ok:
            raise ValueError(f"Drafter config: `{name}` is {found!r} but has to be {text}.")

    return allowed


def _required(config: dict, name: str) -> Any:
    value = _lookup(config, name)
    _expect(value is not None, name, "missing")("given")
    return value


def _lookup(config: dict, name: str, default: Any = None) -> Any:
    """A field of ``dflash_config``, else of the top level, else the default."""
    for level in (config.get("dflash_config") or {}, config):
        if level.get(name) is not None:
            return level[name]
    return default


def _generation(config: dict) -> int:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in GENERATIONS:
            return GENERATIONS[name]
    _expect(False, "architectures", architectures)("one of " + ", ".join(GENERATIONS))


def _refuse_other_families(config: dict):
    _generation(config)
    projector = _lookup(config, "projector_type")
    _expect(projector is None, "projector_type", projector)("absent: only DFlash 1 and 2 are read")
    for name, neutral in (
        ("markov_rank", 0),
        ("attention_sink_bias", False),
        ("attention_bias", False),
        ("partial_rotary_factor", 1.0),
        ("hidden_act", "silu"),
        ("sample_from_anchor", False),
        ("attention_value_scale", 1.0),
        ("draft_vocab_size", config.get("vocab_size")),
    ):
        value = _lookup(config, name, neutral)
        _expect(value == neutral, name, value)(f"{neutral!r} or absent")
    method = (config.get("quantization_config") or {}).get("quant_method")
    _expect(method is None, "quantization_config.quant_method", method)("absent: MLX format only")


def _block_fields(config: dict, num_layers: int) -> dict[str, Any]:
    ids = _lookup(config, "target_layer_ids")
    depth = _lookup(config, "num_target_layers")
    declared = depth is not None
    if ids is None:
        _expect(declared, "target_layer_ids", "missing")("given, or num_target_layers")
        ids = default_target_layer_ids(num_layers, depth)
    return {
        "block_size": int(_lookup(config, "block_size", 16)),
        "target_layer_ids": list(ids),
        "mask_token_id": int(_required(config, "mask_token_id")),
        "num_target_layers": depth if declared else max(ids, default=-1) + 1,
        "num_target_layers_declared": declared,
        "target_hidden_size": _lookup(config, "target_hidden_size"),
    }


def default_target_layer_ids(num_layers: int, num_target_layers: int) -> list[int]:
    """The taps that trainers choose where a config lists none."""
    if num_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + i * step) for i in range(num_layers)]


def _layer_fields(config: dict, num_layers: int) -> dict[str, Any]:
    use_swa = bool(_lookup(config, "use_swa", False)) and not config.get("layer_types")
    default = [SLIDING if use_swa else FULL] * num_layers
    layer_types = list(config.get("layer_types") or default)
    known = len(layer_types) == num_layers and set(layer_types) <= {SLIDING, FULL}
    _expect(known, "layer_types", layer_types)(f"{num_layers} of {SLIDING!r} or {FULL!r}")
    window = config.get("sliding_window") or _lookup(config, "swa_window_size")
    if SLIDING in layer_types:
        _expect(isinstance(window, int) and window > 1, "sliding_window", window)("2 or more")
    return {
        "layer_types": layer_types,
        "sliding_window": window if SLIDING in layer_types else None,
        "causal": [_causal(config, kind, use_swa) for kind in layer_types],
        "rope_parameters": [_rope_parameters(config, kind) for kind in layer_types],
        "rope_traditional": not config.get("rope_is_neox_style", config.get("is_neox_style", True)),
    }


def _causal(config: dict, layer_type: str, use_swa: bool) -> bool:
    nested = config.get("dflash_config") or {}
    for value in (
        config.get("is_causal"),
        nested.get("is_causal"),
        config.get("dflash_query_causal"),
    ):
        if value is not None:
            return bool(value)
    # Drafters that predate the field: their sliding layers were trained causal.
    return layer_type == SLIDING and not use_swa


def _rope_parameters(config: dict, layer_type: str) -> dict[str, Any]:
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = dict(nested.get(layer_type, nested))
    theta, flat = nested.pop("rope_theta", None), config.get("rope_theta")
    _expect(theta or flat, "rope_theta", "missing")("given, flat or in rope_parameters")
    agree = theta is None or flat is None or theta == flat
    _expect(agree, "rope_theta", flat)(f"{theta}, as in rope_parameters")
    factor = nested.pop("partial_rotary_factor", 1.0)
    _expect(factor == 1.0, "rope_parameters.partial_rotary_factor", factor)("1.0 or absent")
    nested.pop("mrope_section", None)
    nested.setdefault("rope_type", nested.pop("type", "default"))
    return nested | {"rope_theta": float(flat if theta is None else theta)}


def _transform_fields(config: dict) -> dict[str, Any]:
    softcap = _lookup(config, "final_logit_softcapping")
    quantization = config.get("quantization") or config.get("quantization_config")
    return {
        "conv_kernel_size": int(_lookup(config, "conv_kernel_size", 0)),
        "conv_group_size": int(_lookup(config, "conv_group_size", 16)),
        "selector_rank": int(_lookup(config, "selector_rank", 0)),
        "selector_top_k": int(_lookup(config, "selector_top_k", 0)),
        "selector_vocab_size": _lookup(config, "selector_vocab_size"),
        "input_embedding_scale": float(_lookup(config, "input_embedding_scale", 1.0)),
        "output_multiplier": float(_lookup(config, "output_multiplier", 1.0)),
        "final_logit_softcapping": float(softcap) if softcap and softcap > 0 else None,
        "quantization": quantization,
    }
