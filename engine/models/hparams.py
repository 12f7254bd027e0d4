"""Hyperparameters of a model, read from GGUF metadata, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.models.rotary import Yarn

_REQUIRED = object()


@dataclass(frozen=True)
class Hparams:
    """What the graph builders need.

    Attributes:
        n_ctx_train: the context length the model was trained with.
        n_embd, n_layer, n_ff, n_vocab: sizes.
        n_head, n_head_kv: query heads and the KV heads they share.
        head_k, head_v: dimensions of a key and of a value.
        n_rot: rotated dimensions of a head.
        eps: of RMS_NORM.
        rope_base, rope_scale: base of the angles, and what positions are divided by.
        window: sliding window in tokens, 0 for none; `windowed[il]` says which layers have it.
        rope_base_windowed: the base in those layers.
        logit_cap: final logits are cap * tanh(logits / cap), 0 for none.
        yarn: how `rope_scale` is spread over frequencies, None for all alike.
    """

    architecture: str
    name: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    n_rot: int
    eps: float
    rope_base: float
    rope_scale: float
    window: int
    windowed: tuple[bool, ...]
    rope_base_windowed: float
    logit_cap: float
    yarn: Yarn | None = None

    @property
    def attention_scale(self) -> float:
        return 1 / sqrt(self.head_k)


class Keys:
    """Typed look-ups of `<architecture>.<key>`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.architecture = metadata, architecture

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if value is _REQUIRED:
            raise ModelError(f"the metadata key {full} is missing: the file is no complete {self.architecture} model")
        if isinstance(value, (list, np.ndarray)):
            value = self._same(full, value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"the metadata key {full} is {value!r}: a number is expected")
        return value

    @staticmethod
    def _same(full: str, values: Any) -> Any:
        """One value for all layers."""
        if len(set(values)) != 1:
            raise ModelError(f"the metadata key {full} differs between layers ({list(values)[:8]}): one value for all is supported")
        return values[0].item() if hasattr(values[0], "item") else values[0]

    def count(self, key: str, default: Any = _REQUIRED, largest: int = 1 << 24) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 < value <= largest:
            raise ModelError(f"the metadata key {self.architecture}.{key} is {value!r}: 1 to {largest} is expected")
        return value

    def natural(self, key: str, default: int) -> int:
        """0, or what `count` takes."""
        return 0 if self.number(key, default) == 0 else self.count(key, default)

    def positive(self, key: str, default: Any = _REQUIRED) -> float:
        value = float(self.number(key, default))
        if not 0 < value < float("inf"):
            raise ModelError(f"the metadata key {self.architecture}.{key} is {value!r}: a number above 0 is expected")
        return value


def read_hparams(metadata: Mapping[str, Any], n_vocab: int, default_pattern: int = 0) -> Hparams:
    """Hyperparameters of a model whose embedding has `n_vocab` rows; every `default_pattern`-th layer has no window.

    Raises:
        ModelError: a key is missing, of the wrong type, or asks for something that is not supported.
    """
    architecture = str(metadata.get("general.architecture", ""))
    keys = Keys(metadata, architecture)
    _refuse(keys)
    n_embd, n_layer = keys.count("embedding_length"), keys.count("block_count", largest=1024)
    n_head = keys.count("attention.head_count", largest=4096)
    n_head_kv = keys.count("attention.head_count_kv", n_head, largest=4096)
    head_k = keys.count("attention.key_length", max(1, n_embd // n_head), largest=4096)
    if n_head % n_head_kv:
        raise ModelError(f"{n_head} attention heads do not share {n_head_kv} KV heads evenly")
    n_rot = keys.count("rope.dimension_count", head_k, largest=4096)
    if n_rot > head_k or n_rot % 2:
        raise ModelError(f"{n_rot} rotated dimensions of a head of {head_k}: an even number up to {head_k} is expected")
    window = keys.natural("attention.sliding_window", 0)
    base = keys.positive("rope.freq_base", 10000.0)
    return Hparams(
        architecture, str(metadata.get("general.name", "")), keys.count("context_length", largest=1 << 30), n_embd, n_layer,
        keys.count("feed_forward_length"), n_vocab, n_head, n_head_kv, head_k,
        keys.count("attention.value_length", head_k, largest=4096), n_rot,
        float(keys.number("attention.layer_norm_rms_epsilon")), base, _rope_scale(keys), window,
        _windowed(keys, n_layer, window, default_pattern), keys.positive("rope.freq_base_swa", min(base, 10000.0)),
        float(keys.number("final_logit_softcapping", 0.0)), _yarn(keys, base))


def _refuse(keys: Keys) -> None:
    if keys.number("expert_count", 0):
        raise ModelError(f"{keys.architecture} with experts is not supported yet: dense models are")
    kind = keys.metadata.get(f"{keys.architecture}.rope.scaling.type", "none")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported: none, linear and yarn are")


def _rope_scale(keys: Keys) -> float:
    return keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))


def _yarn(keys: Keys, base: float) -> Yarn | None:
    if keys.metadata.get(f"{keys.architecture}.rope.scaling.type") != "yarn":
        return None
    at = "rope.scaling"
    share = float(keys.number(f"{at}.yarn_ext_factor", 1.0))
    if base <= 1 or not 0 <= share <= 1:
        raise ModelError(f"YaRN with a base of {base} and a share of {share}: a base above 1 and a share of 0 to 1 are expected")
    return Yarn(keys.count(f"{at}.original_context_length", keys.number("context_length"), largest=1 << 30),
                keys.positive(f"{at}.yarn_beta_fast", 32.0), keys.positive(f"{at}.yarn_beta_slow", 1.0),
                share, keys.positive(f"{at}.attn_factor", 1.0) * keys.positive(f"{at}.yarn_attn_factor", 1.0))


def _windowed(keys: Keys, n_layer: int, window: int, default_pattern: int) -> tuple[bool, ...]:
    """Which layers have the sliding window: listed in the file, or all but every n-th."""
    if not window:
        return (False,) * n_layer
    given = keys.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern", default_pattern)
    if isinstance(given, (list, np.ndarray)):
        if len(given) != n_layer:
            raise ModelError(f"{keys.architecture}.attention.sliding_window_pattern has {len(given)} entries for {n_layer} layers")
        return tuple(bool(g) for g in given)
    return tuple(bool(given) and il % int(given) < int(given) - 1 for il in range(n_layer))
