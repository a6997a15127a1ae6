"""A target run layer by layer through the model's own public modules."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from .shape import TargetShape


class Forward(NamedTuple):
    """What one pass gives.

    Attributes:
        hidden (mx.array): After the final norm, [B, L, H].
        taps (mx.array, optional): The tapped layers' outputs in the order asked for, [B, L, T * H].
        records (list): For each cache what its rollback needs, or ``None``.
    """

    hidden: mx.array
    taps: mx.array | None
    records: list[Any]


class Target:
    """A dense mlx-lm model with one kind of attention mask; other kinds override a method or two.

    Nothing of the model is replaced or changed: the pass calls the same modules in the same
    order as the model's own pass, and keeps the outputs that a drafter taps.

    Args:
        model (nn.Module): From mlx-lm.

    Raises:
        ValueError: if the model is split over several machines.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.language_model = language_model(model)
        self.inner = self.language_model.model
        self.layers = list(self.language_model.layers)
        # Every rank knows the size; only some can tell by their layers.
        if getattr(self.inner, "pipeline_size", 1) > 1:
            raise ValueError("A target that is split over several machines is not supported.")

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""
        return _base(self.head_module).weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding: token ids have to be below."""
        return _base(self.inner.embed_tokens).weight.shape[0]

    @property
    def shape(self) -> TargetShape:
        return TargetShape(self.inner.norm.weight.shape[0], self.vocab_size, len(self.layers))

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        return make_prompt_cache(self.model, max_kv_size)

    def forward(
        self,
        tokens: mx.array,
        cache: list[Any],
        tap_layers: Sequence[int] = (),
        record: bool = False,
    ) -> Forward:
        """Run tokens [B, L] through all layers, updating the cache in place.

        Args:
            tokens (mx.array): Token ids [B, L].
            cache (list): The target's cache, from :meth:`make_cache`.
            tap_layers (sequence of int): Layers whose outputs to keep, increasing.
            record (bool): Whether to keep what recurrent layers need to return to any of these
                rows.
        """
        h = self.embed_inputs(tokens)
        extras = self.layer_inputs(tokens, h, cache)
        records: list[Any] = [None] * len(cache)
        taps = []
        for index, layer in enumerate(self.layers):
            layer_cache = cache[index] if index < len(cache) else None
            if record and self.is_recurrent(index):
                h, records[index] = self.run_recorded(layer, h, layer_cache)
            else:
                h = self.run_layer(index, layer, h, layer_cache, extras)
            if index in tap_layers:
                taps.append(h)
        joined = mx.concatenate(taps, axis=-1) if taps else None
        return Forward(self.inner.norm(h), joined, records)

    def embed_inputs(self, tokens: mx.array) -> mx.array:
        """Embed token ids [B, L] as the target's own first layer reads them: [B, L, H]."""
        return self.inner.embed_tokens(tokens)

    def layer_inputs(self, tokens: mx.array, h: mx.array, cache: list[Any]) -> Any:
        """Make what the layers need beside ``h``: here the attention mask that they share."""
        return create_attention_mask(h, cache[0])

    def run_layer(
        self, index: int, layer: nn.Module, h: mx.array, cache: Any, extras: Any
    ) -> mx.array:
        """Run a layer on ``h`` [B, L, H]; ``extras`` come from :meth:`layer_inputs`."""
        return layer(h, extras, cache)

    def is_recurrent(self, index: int) -> bool:
        """Tell whether a layer's cache is a state that cannot be trimmed."""
        return False

    def run_recorded(self, layer: nn.Module, h: mx.array, cache: Any) -> tuple[mx.array, Any]:
        """Run a recurrent layer; also return the record that its rollback needs."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent layers.")

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed token ids [B, L] as drafters were trained on them: [B, L, H]."""
        return self.inner.embed_tokens(tokens)

    def head(self, hidden: mx.array, part: nn.Module | None = None) -> mx.array:
        """Compute raw logits [..., V] of the drafter's rows [..., H].

        Scale and soft cap are left out: drafters state their own. ``part`` is the head of some
        ids, from :meth:`narrow_head`.
        """
        head = _base(self.head_module)
        dtype = (head.scales if "scales" in head else head.weight).dtype
        # A head in 16 bits would be widened, and read at half the speed, by a float32 row.
        hidden = hidden.astype(dtype) if mx.issubdtype(dtype, mx.floating) else hidden
        return self.unembed(hidden, part)

    def logits(self, hidden: mx.array) -> mx.array:
        """Compute the target's own logits [..., V] of rows [..., H] after the final norm."""
        return self.transform(self.unembed(hidden))

    def transform(self, raw: mx.array) -> mx.array:
        """Apply the target's own scale and soft cap to what the head's matrix gives."""
        return raw

    def unembed(self, hidden: mx.array, head: nn.Module | None = None) -> mx.array:
        """Multiply rows [..., H] with the head's matrix, tied or not, or with a part of it."""
        head = self.head_module if head is None else head
        return head.as_linear(hidden) if self._tied else head(hidden)

    def head_rows(self, ids: mx.array) -> mx.array:
        """Return the head's weights [n, H] of some token ids, unpacked.

        Raises:
            ValueError: if the head has more than one matrix: a bias, or an adapter.
        """
        head = self.head_module
        if head is not _base(head) or "bias" in head:
            raise ValueError("The target's head has a bias or an adapter: rows cannot be picked.")
        if "scales" not in head:
            return head.weight[ids]
        biases = head.biases[ids] if head.get("biases") is not None else None
        packed = head.weight[ids], head.scales[ids], biases
        scheme = {"group_size": head.group_size, "bits": head.bits, "mode": head.mode}
        return mx.dequantize(*packed, **scheme)

    def narrow_head(self, ids: mx.array) -> nn.Module:
        """Return a copy of the head's module with the rows of some token ids, packed as they are.

        Raises:
            ValueError: if the head has an adapter.
        """
        head = copy.copy(self.head_module)
        if head is not _base(head):
            raise ValueError("The target's head has an adapter: rows cannot be picked.")
        for name in ("weight", "scales", "biases", "bias"):
            if isinstance(head.get(name), mx.array):
                head[name] = head[name][ids]
        return head

    @property
    def _tied(self) -> bool:
        return "lm_head" not in self.language_model

    @property
    def head_module(self) -> nn.Module:
        """The module of the head: where it is tied, the embedding."""
        return self.inner.embed_tokens if self._tied else self.language_model.lm_head


def _base(module: nn.Module) -> nn.Module:
    """Return the layer under an adapter's."""
    return module.get("linear", module.get("embedding", module))


def language_model(model: nn.Module) -> nn.Module:
    """Return the text model inside a model that wraps one, else the model itself."""
    while hasattr(model, "language_model"):
        model = model.language_model
    return model


class SlidingTarget(Target):
    """A model whose layers either slide or see everything, each kind with its own mask."""

    def slides(self, layer: nn.Module) -> bool:
        """Tell whether a layer sees only a window."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """Positions that a sliding layer sees."""
        raise NotImplementedError

    def layer_inputs(self, tokens: mx.array, h: mx.array, cache: list[Any]) -> dict[bool, Any]:
        masks: dict[bool, Any] = {}
        for layer, layer_cache in zip(self.layers, cache, strict=False):
            slides = self.slides(layer)
            if slides not in masks:
                window = self.window if slides else None
                masks[slides] = create_attention_mask(h, layer_cache, window_size=window)
        return masks

    def run_layer(
        self, index: int, layer: nn.Module, h: mx.array, cache: Any, extras: Any
    ) -> mx.array:
        return layer(h, extras[self.slides(layer)], cache)
