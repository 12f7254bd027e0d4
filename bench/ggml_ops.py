"""Calls of single ops in ggml, through ctypes on the libraries of the wheel `libggml-python`.

Weights lie as files hold them, or in ggml's own repacked layout ("repack") where it has one for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, CFUNCTYPE, POINTER, RTLD_GLOBAL, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from engine.benchmark import OpCase
from engine.dtypes import DTYPES

BUFFER_FIELD = 8  # where `buffer` lies in a ggml_tensor: behind `type`
USAGE_WEIGHTS = 1
ALIGNMENT = 64
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_new_tensor": (c_void_p, (c_void_p, c_int, c_int, POINTER(c_int64))), "ggml_mul_mat": (c_void_p, (c_void_p,) * 3),
    "ggml_get_rows": (c_void_p, (c_void_p,) * 3), "ggml_rms_norm": (c_void_p, (c_void_p, c_void_p, c_float)),
    "ggml_soft_max_ext": (c_void_p, (c_void_p, c_void_p, c_void_p, c_float, c_float)),
    "ggml_flash_attn_ext": (c_void_p, (*(c_void_p,) * 5, c_float, c_float, c_float)), "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)), "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)), "ggml_nbytes": (c_size_t, (c_void_p,)), "ggml_version": (c_char_p, ()),
    "ggml_free": (None, (c_void_p,)),
    "ggml_threadpool_params_init": (None, (c_void_p, c_int)), "ggml_threadpool_new": (c_void_p, (c_void_p,)),
    "ggml_backend_cpu_init": (c_void_p, ()), "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_cpu_set_threadpool": (None, (c_void_p, c_void_p)), "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)), "ggml_backend_cpu_reg": (c_void_p, ()),
    "ggml_backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)), "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)), "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_buft_get_alloc_size": (c_size_t, (c_void_p, c_void_p)), "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    "ggml_backend_buffer_set_usage": (None, (c_void_p, c_int)), "ggml_backend_tensor_alloc": (c_int, (c_void_p, c_void_p, c_void_p)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
}
FEATURES = ("avx2", "avx512", "avx512_vnni", "avx_vnni", "fma", "f16c", "llamafile", "neon", "dotprod", "matmul_int8")


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (("cpumask", c_bool * 512), ("n_threads", c_int), ("prio", c_int), ("poll", c_uint32), ("strict_cpu", c_bool),
                ("paused", c_bool))


class Library:
    """ggml's functions by name, and a CPU backend of it with a thread pool."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._libraries = [CDLL(str(folder / f"lib{name}.so"), mode=RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")]
        for name, (result, arguments) in _FUNCTIONS.items():
            function = self._find(name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self._quiet = CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, user: None)
        self._find("ggml_log_set")(self._quiet, None)
        init = self._find("ggml_init")
        init.restype, init.argtypes = c_void_p, (_InitParams,)
        self.init = init
        pool = _ThreadpoolParams()
        self.threadpool_params_init(ctypes.byref(pool), threads)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)
        self.backend_cpu_set_threadpool(self.backend, self.threadpool_new(ctypes.byref(pool)))
        self.device = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} is not among the functions used here")

    def _find(self, name: str) -> Any:
        return next(getattr(lib, name) for lib in self._libraries if hasattr(lib, name))

    @property
    def features(self) -> str:
        """What the build uses: "avx2=1 ..."."""
        return " ".join(f"{name}={self._find(f'ggml_cpu_has_{name}')()}" for name in FEATURES)

    def repacked(self) -> Any:
        """The buffer type whose weights are repacked, or None."""
        address = self.backend_reg_get_proc_address(self.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        found = CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
        i = 0
        while found and found[i]:
            if b"REPACK" in self.backend_buft_name(found[i]):
                return found[i]
            i += 1
        return None


class Prepared:
    """`n_calls` calls in one graph, each on operands of its own; all write the same result. Close it to give the memory back."""

    def __init__(self, lib: Library, case: OpCase, data: Mapping[str, np.ndarray], n_calls: int, repack: bool) -> None:
        self.lib, self.case, self.n_calls = lib, case, n_calls
        operands = OPERANDS[case.op.name](case, data)
        n_tensors = (len(operands) + 1) * n_calls + 16
        size = 2 * n_tensors * lib.tensor_overhead() + lib.graph_overhead_custom(n_tensors, False) + (1 << 16)
        self.context = lib.init(_InitParams(size, None, True))
        self._buffers: list[Any] = []
        sets = [[self._tensor(kind, array) for kind, array in operands] for _ in range(n_calls)]
        results = [NODES[case.op.name](lib, self.context, case, tensors) for tensors in sets]
        plain = lib.backend_cpu_buffer_type()
        weights = lib.repacked() if repack else plain
        if repack and (weights is None or not self._fits(weights, sets[0][0], results[0])):
            self.close()
            raise LookupError(f"ggml has no repacked layout for {case}")
        for position, (_, array) in enumerate(operands):
            self._place(weights if position == 0 else plain, [tensors[position] for tensors in sets], array)
        shared = lib.backend_buft_alloc_buffer(plain, lib.backend_buft_get_alloc_size(plain, results[0]) + ALIGNMENT)
        self._buffers.append(shared)
        for result in results:
            lib.backend_tensor_alloc(shared, result, lib.backend_buffer_get_base(shared))
        self.result = results[-1]
        self.graph = lib.new_graph_custom(self.context, n_tensors, False)
        for result in results:
            lib.build_forward_expand(self.graph, result)

    def _tensor(self, kind: str, array: np.ndarray) -> Any:
        """A tensor for an array of stored elements, its dimensions turned round."""
        dtype = DTYPES[kind]
        shape = [array.shape[-1] * dtype.block_size, *reversed(array.shape[:-1])]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        return self.lib.new_tensor(self.context, dtype.ggml_id, len(shape), (c_int64 * len(shape))(*shape))

    def _fits(self, type: Any, weight: Any, node: Any) -> bool:
        """Does ggml run the node with its weight in memory of this type? It looks at the weight's buffer, so it gets an empty one."""
        place = c_void_p.from_address(weight + BUFFER_FIELD)
        empty = self.lib.backend_buft_alloc_buffer(type, 0)
        place.value = empty
        able = self.lib.backend_dev_supports_op(self.lib.device, node)
        place.value = None
        self.lib.backend_buffer_free(empty)
        return bool(able)

    def _place(self, type: Any, tensors: Sequence[Any], array: np.ndarray) -> None:
        lib, data = self.lib, np.ascontiguousarray(array)
        each = -(-lib.backend_buft_get_alloc_size(type, tensors[0]) // ALIGNMENT) * ALIGNMENT
        buffer = lib.backend_buft_alloc_buffer(type, each * len(tensors))
        self._buffers.append(buffer)
        lib.backend_buffer_set_usage(buffer, USAGE_WEIGHTS)
        for i, t in enumerate(tensors):
            lib.backend_tensor_alloc(buffer, t, lib.backend_buffer_get_base(buffer) + i * each)
            lib.backend_tensor_set(t, data.ctypes.data, 0, data.nbytes)

    def run(self) -> None:
        """Compute the graph. Raises RuntimeError if ggml fails."""
        if self.lib.backend_graph_compute(self.lib.backend, self.graph):
            raise RuntimeError(f"ggml fails on {self.case}")

    def get(self) -> np.ndarray:
        """The float32 result in the shape our op has."""
        node = self.case.node(self.case.leaves())
        out = np.empty(node.shape, np.float32)
        self.lib.backend_tensor_get(self.result, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        for buffer in self._buffers:
            self.lib.backend_buffer_free(buffer)
        self.lib.free(self.context)


Operands = Callable[[OpCase, Mapping[str, np.ndarray]], list[tuple[str, np.ndarray]]]


def _as_they_are(case: OpCase, data: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return [(case.types[name], array) for name, array in data.items()]


def _attention(case: OpCase, data: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """K comes out of its blocks of 32 keys, heads come before tokens."""
    keys = data["k"].transpose(0, 1, 3, 2).reshape(data["k"].shape[0], -1, data["k"].shape[2])
    return [(case.types["q"], np.swapaxes(data["q"], -2, -3)), (case.types["k"], keys), (case.types["v"], data["v"]),
            ("f16", data["mask"].astype(np.float16))]


# op -> its operands as ggml takes them, the one that may be repacked first; and the node made of them
OPERANDS: Mapping[str, Operands] = {"mul_mat": _as_they_are, "get_rows": _as_they_are, "rms_norm": _as_they_are, "soft_max": _as_they_are,
                                    "flash_attn_ext": _attention}
NODES: Mapping[str, Callable[[Any, Any, OpCase, Sequence[Any]], Any]] = {
    "mul_mat": lambda lib, ctx, case, t: lib.mul_mat(ctx, *t),
    "get_rows": lambda lib, ctx, case, t: lib.get_rows(ctx, *t),
    "rms_norm": lambda lib, ctx, case, t: lib.rms_norm(ctx, *t, {**case.op.params, **case.params}["eps"]),
    "soft_max": lambda lib, ctx, case, t: lib.soft_max_ext(ctx, *t, {**case.op.params, **case.params}["factor"], 0.0),
    "flash_attn_ext": lambda lib, ctx, case, t: lib.flash_attn_ext(ctx, *t, {**case.op.params, **case.params}["factor"], 0.0,
                                                                   {**case.op.params, **case.params}["cap"]),
}
