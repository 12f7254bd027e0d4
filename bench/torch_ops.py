"""Calls of single ops in PyTorch on the CPU, with operands in the types they have: float types only, and the ops listed below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.benchmark import OpCase, sets_of
from engine.dtypes import DTYPES, FLOATS, I32, I64, DType

Operands = Mapping[str, torch.Tensor]
FLOAT_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class TorchCall:
    """`n_calls` calls, each on operands of its own. Raises LookupError for what PyTorch does not have."""

    def __init__(self, case: OpCase, data: Mapping[str, np.ndarray], cold: int) -> None:
        if case.op.name not in CALLS:
            raise LookupError(f"{case.op.name} is not compared with PyTorch")
        self.run_one, taken = CALLS[case.op.name]
        if unknown := sorted(set(data) - set(taken)):
            raise LookupError(f"{case.op.name} with {unknown[0]} is not compared with PyTorch")
        self.params: Mapping[str, Any] = {**case.op.params, **case.params}
        one = {name: _tensor(array, DTYPES[case.types[name]]) for name, array in data.items()}
        if "w" in one and case.op.name == "mul_mat":
            one["x"] = one["x"].to(one["w"].dtype)
        self.n_calls = sets_of(sum(t.nbytes for t in one.values()), cold)
        self.sets = [{name: t.clone() for name, t in one.items()} for _ in range(self.n_calls)]

    @torch.inference_mode()
    def run(self) -> None:
        for operands in self.sets:
            self.result = self.run_one(operands, self.params)

    def get(self) -> np.ndarray:
        return self.result.to(torch.float32).contiguous().numpy()


def _tensor(array: np.ndarray, dtype: DType) -> torch.Tensor:
    if dtype in (I32, I64):
        return torch.from_numpy(array.astype(np.int64))
    if dtype not in FLOATS:
        raise LookupError(f"PyTorch has no {dtype}")
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(FLOAT_TYPES[dtype.name])


def _soft_max(t: Operands, p: Mapping[str, Any]) -> torch.Tensor:
    x = t["x"] * p["factor"]
    return torch.softmax(x + t["mask"] if "mask" in t else x, -1)


def _attention(t: Operands, p: Mapping[str, Any]) -> torch.Tensor:
    """K comes out of its blocks of 32 keys; heads come before tokens."""
    if p["cap"]:
        raise LookupError("attention with a soft cap is not compared with PyTorch")
    kind = t["k"].dtype
    keys = t["k"].transpose(-1, -2).flatten(-3, -2)
    q, mask = t["q"].transpose(-2, -3).to(kind), t["mask"].to(kind) if "mask" in t else None
    return F.scaled_dot_product_attention(q[None], keys[None], t["v"][None], mask, scale=p["factor"], enable_gqa=True)[0].transpose(-2, -3)


Call = Callable[[Operands, Mapping[str, Any]], torch.Tensor]
# op -> the call, and the operands it knows
CALLS: Mapping[str, tuple[Call, tuple[str, ...]]] = {
    "mul_mat": (lambda t, p: t["x"] @ t["w"].transpose(-1, -2), ("w", "x")),
    "get_rows": (lambda t, p: F.embedding(t["ids"][0, 0], t["w"][0, 0]).float(), ("w", "ids")),
    "rms_norm": (lambda t, p: F.rms_norm(t["x"], t["x"].shape[-1:], eps=p["eps"]), ("x",)),
    "soft_max": (_soft_max, ("x", "mask")),
    "flash_attn_ext": (_attention, ("q", "k", "v", "mask")),
    "add": (lambda t, p: t["x"] + t["w"], ("x", "w")), "mul": (lambda t, p: t["x"] * t["w"], ("x", "w")),
    "scale": (lambda t, p: t["x"] * p["factor"] + p["bias"], ("x",)),
    "silu": (lambda t, p: F.silu(t["x"]), ("x",)), "tanh": (lambda t, p: torch.tanh(t["x"]), ("x",)),
    "gelu": (lambda t, p: F.gelu(t["x"], approximate="tanh"), ("x",)),
    "swiglu": (lambda t, p: F.silu(t["x"]) * t["u"], ("x", "u")),
    "geglu": (lambda t, p: F.gelu(t["x"], approximate="tanh") * t["u"], ("x", "u")),
}
