"""Rows of `lanewise bench op`: calls of real sizes, timed and compared with the op's reference.

Note [cold]: an op is timed on several sets of operands in turn, together larger than the last-level cache, so that operands come from
memory as a model's weights do. All sets write the same result: each call waits for the one before, as in a graph, and the result stays in
the cache. So the share of the roofline counts what is read, and the GB/s what is read and written.

Note [checked]: what was timed is compared with the op's reference, in float64, on evenly spread rows of the result. The
reference of a quantised product takes the activations as they were given: kernels keep 15 bits of them, so one limit holds for every type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine.backend import Backend, BufferType, place
from engine.benchmark.plans import Prepared, buffer_of, memory_of, plan_of
from engine.benchmark.roofline import Roofline
from engine.benchmark.timing import Machine, WrongResult, cache_nbytes, compile_seconds, machine, measure, rounded
from engine.dtypes import DTYPES, I32, I64, IQ1_M, MXFP4, Q8_X, RADIX, WEIGHT_BLOCKS, DType, from_bf16, to_bf16
from engine.errors import ShapeError
from engine.gguf.quants import dequantize
from engine.op import Call, Op, Operand
from engine.tensor import Tensor, leaf

Array = np.ndarray[Any, Any]
NMSE = 1e-7  # of a result: squared differences over squared values
MAX_SETS = 128
N_REFERENCE = 48  # rows of a result that are compared, in each dimension that can be cut

# What an extent is where a shape does not name it; every other one is 1.
DERIVED: Mapping[str, Callable[[Mapping[str, int]], int]] = {
    "half": lambda sizes: sizes["n"] // 2, "blocks": lambda sizes: -(-sizes["m"] // 32), "e": lambda sizes: sizes["d"],
    "wn": lambda sizes: sizes["n"],
}
_MODEL_TYPES = "q4_1,q4_0,q5_0,q8_0,f16"
_ALL_TYPES = "q4_0,q4_1,q5_0,q5_1,q8_0,q4_k,q5_k,q6_k,f16"
_ROWS = "c=1/512,n=576/640"
_GATES = "c=1/512,n=1536/2048"
# op -> (types, shapes): sizes of SmolLM2-135M and Gemma3-270M, of models with an embedding of 4,096, one token and 512.
SUITE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "mul_mat": ((_MODEL_TYPES, "m=192/576/1536,k=576,n=1/512 m=576,k=1536,n=1/512"), ("q8_0", "m=49152,k=576,n=1 m=262144,k=640,n=1"),
                ("q4_k,q6_k", "m=576,k=1536,n=1/512 m=640,k=2048,n=1/512"), ("q5_0,q8_0", "m=1024/2048,k=640,n=1/512"),
                (_ALL_TYPES, "m=4096,k=4096/14336,n=1/512")),
    "quantize_rows": (("f32", "n=1/512,k=576/1536/4096"),),
    "get_rows": (("q8_0,q4_0,q6_k,f16", "m=32000,n=4096,r=1/512"), ("q8_0", "m=49152,n=576,r=1/512 m=262144,n=640,r=1/512")),
    "set_rows": (("f16,f32", "b=3,r=1/512,n=64,m=4096 b=1,r=1/512,n=256,m=4096"),),
    "set_keys": (("f16,f32", "r=1/512,h=3,d=64,m=4096 r=1/512,h=1,d=256,m=4096"),),
    "rms_norm": (("f32", f"{_ROWS} c=1/512,n=4096 c=2048,n=256"),),
    "rope": (("f32", "t=1/512,h=9,n=64 t=1/512,h=4,n=256,neox=1 t=1/512,h=32,n=128"),),
    "soft_max": (("f32", "h=9,r=1,n=1024/4096 h=9,r=512,n=512"),),
    "flash_attn_ext": (("f16,f32", "t=1,h=9,kv=3,d=64,m=1024/4096 t=1,h=4,kv=1,d=256,m=1024/4096 t=1,h=32,kv=8,d=128,m=1024/4096"),
                       ("f16", "t=512,h=9,kv=3,d=64,m=512/4096 t=512,h=4,kv=1,d=256,m=512")),
    "add": (("f32", f"{_ROWS},wc=1 c=512,n=576/640,wc=512"),), "mul": (("f32", _ROWS),), "scale": (("f32", _ROWS),),
    "cpy": (("x=f32+y=f16,x=f16+y=f32", "c=512,n=576/3072"),),
    "silu": (("f32", _GATES),), "gelu": (("f32", _GATES),), "tanh": (("f32", _GATES),),
    "swiglu": (("f32", _GATES),), "geglu": (("f32", _GATES),),
    "rms_norm_mul": (("f32", _ROWS),), "rms_norm_mul_add": (("f32", _ROWS),), "rms_norm_mul_quantize": (("f32", _ROWS),),
    "swiglu_quantize": (("f32", _GATES),), "geglu_quantize": (("f32", _GATES),),
    "mul_mat_id": (("q4_k,q8_0,f16", "e=32,m=768,k=2048,t=1/64,u=4 e=32,m=2048,k=768,t=1/64,u=4,xu=4"),),
    "pack_keys": (("f32,f16", "t=512,kv=12,d=64"),), "ssm_conv": (("f32", "i=1536,n=4/515,w=4"),),
    "ssm_scan": (("f32", "t=1/128,h=1536,n=16,an=16 t=1/128,h=24,p=64,n=128"),),
    "rope_set_keys": (("y=f16", "r=1/512,h=3,d=64,half=32,m=4096 r=1/512,h=1,d=256,half=128,neox=1,m=4096"),),
}


@dataclass(frozen=True)
class OpCase:
    """One call of an op: the type of each operand and of the result, extents, parameters."""

    op: Op
    types: Mapping[str, str]
    sizes: Mapping[str, int]
    params: Mapping[str, Any]
    shape: str

    def node(self, operands: Mapping[str, Tensor]) -> Tensor:
        """A graph node of this call. Raises ShapeError where it is no legal one."""
        return self.op(*(operands.get(o.name) for o in self.op.contract.operands), **self.params)

    def leaves(self) -> dict[str, Tensor]:
        """The operands, without memory."""
        return {o.name: leaf(DTYPES[self.types[o.name]], self.shape_of(o.dims), o.name) for o in self.operands}

    @property
    def operands(self) -> list[Operand]:
        """Those a call has: of what may be left out, only a mask."""
        return [o for o in self.op.contract.operands if not o.optional or o.name == "mask"]

    def shape_of(self, dims: Sequence[str | int]) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else self.sizes[d] for d in dims)

    @property
    def type_names(self) -> str:
        """ "q4_0,f32->f32". """
        operands = ",".join(self.types[o.name] for o in self.operands)
        return f"{operands}->{self.types[self.op.contract.result.name]}"

    def __str__(self) -> str:
        return f"{self.op.name}({self.type_names}; {self.shape})"


def cases(op: Op, types: Sequence[str] | None = None, shapes: Sequence[str] | None = None) -> list[OpCase]:
    """The calls of `op` that a bench times.

    Args:
        types: each a type for all operands that can have it ("q4_0"), or for named ones ("x=f32+y=f16"). None: those of the suite.
        shapes: each extents and parameters, "m=4096,k=4096/14336,n=1" (`/` between alternatives). None: those of the suite that fit.

    Raises:
        ShapeError: a type or shape that the op cannot have, or none that fits.
    """
    suite = SUITE.get(op.name) or (("", _plain_shape(op)),)
    if types is None and shapes is None:
        wanted = [(t, s) for ts, ss in suite for t in ts.split(",") for s in ss.split()]
    else:
        some_types = types or list(dict.fromkeys(t for ts, _ in suite for t in ts.split(",")))
        some_shapes = shapes or list(dict.fromkeys(s for _, ss in suite for s in ss.split()))
        wanted = [(t, s) for t in some_types for s in some_shapes]
    made: dict[tuple[str, str], OpCase] = {}
    refused = ShapeError(f"{op.name}: no type or shape was given")
    for kind, shape in wanted:
        operand_types = _types(op, kind)
        for one in _alternatives(shape):
            case = _case(op, operand_types, one)
            try:
                case.node(case.leaves())
            except ShapeError as error:
                if types and shapes:
                    raise
                refused = error
            else:
                made[case.type_names, case.shape] = case
    if not made:
        raise refused
    return list(made.values())


def _case(op: Op, types: Mapping[str, str], shape: str) -> OpCase:
    sizes: dict[str, int] = {}
    params: dict[str, Any] = {}
    for part in shape.split(","):
        name, sign, value = part.partition("=")
        try:
            if name in op.params:
                params[name] = type(op.params[name])(value)
            elif sign and (name in op.contract.dims or name == "m" and "blocks" in op.contract.dims):
                sizes[name] = int(value)
            else:
                known = ", ".join((*op.contract.dims, *op.params))
                raise ShapeError(f"{op.name} has no {name!r}: {known} are known, as in {_plain_shape(op)}")
        except ValueError:
            raise ShapeError(f"{op.name}: {part!r} has no number") from None
    sizes = {"n": 1, "m": 1, "d": 1} | sizes
    for name in op.contract.dims:
        if name not in sizes:
            sizes[name] = DERIVED[name](sizes) if name in DERIVED else 1
    if op.name == "cpy":
        params["dtype"] = types["y"]
    return OpCase(op, types, sizes, params, shape)


def _plain_shape(op: Op) -> str:
    """A shape for an op that has none in the suite: rows of 2,048, 64 of them."""
    inner = {o.dims[-1] for o in op.contract.views if isinstance(o.dims[-1], str)}
    outer = {o.dims[-2] for o in op.contract.views if len(o.dims) > 1 and isinstance(o.dims[-2], str)} - inner
    return ",".join([f"{d}=2048" for d in op.contract.dims if d in inner] + [f"{d}=64" for d in op.contract.dims if d in outer])


def _alternatives(shape: str) -> Iterator[str]:
    """ "n=1/512,k=64": "n=1,k=64" and "n=512,k=64". """
    parts = [part.partition("=") for part in shape.split(",")]
    for values in itertools.product(*(value.split("/") for _, _, value in parts)):
        yield ",".join(f"{name}={value}" for (name, _, _), value in zip(parts, values, strict=True))


def _types(op: Op, text: str) -> dict[str, str]:
    """The type of each operand: the first it may have, but for what `text` says."""
    made = {name: kinds[0].name for name, kinds in op.types.items()}
    for part in text.split("+") if text else ():
        operand, sign, kind = part.rpartition("=")
        able = [n for n, kinds in op.types.items() if kind in {k.name for k in kinds} and (not sign or n == operand)]
        if not able:
            known = sorted({k.name for kinds in op.types.values() for k in kinds})
            raise ShapeError(f"{op.name} has no operand {f'{operand!r} ' if sign else ''}of type {kind!r}: {', '.join(known)} are possible")
        made |= dict.fromkeys(able, kind)
    return made


# -- data, and the check against the reference ------------------------------------------------------------------


def make_data(case: OpCase, seed: int = 0) -> dict[str, Array]:
    """Stored elements of each operand: numbers of a model's size, causal masks, ids that are distinct where there is room."""
    rng = np.random.default_rng(seed)
    return {o.name: _stored(rng, case, o.name, case.shape_of(o.dims), DTYPES[case.types[o.name]]) for o in case.operands}


def _stored(rng: np.random.Generator, case: OpCase, name: str, shape: tuple[int, ...], dtype: DType) -> Array:
    if dtype in (I32, I64):
        room = 32 * case.sizes["blocks"] if "blocks" in case.sizes else case.sizes["m"] if "m" in case.op.contract.dims else 1 << 12
        if case.op.name == "mul_mat_id":
            room = case.sizes["e"]
        count = math.prod(shape)
        ids = rng.permutation(room)[:count] if count <= room else rng.integers(0, room, count)
        return ids.astype(dtype.numpy).reshape(shape)
    if dtype in WEIGHT_BLOCKS:
        return _blocks(rng, shape, dtype)
    if name == "mask":
        last = shape[-1] - shape[-2] + np.arange(shape[-2])
        x = np.broadcast_to(np.where(np.arange(shape[-1]) <= last[:, None], 0, -np.inf), shape)
    elif name == "a":  # decays of a state
        x = -rng.uniform(0.5, 1, shape)
    elif name == "freqs":
        turns = 1e4 ** (-np.arange(shape[-1]) / shape[-1]) / (2 * np.pi)
        x = np.stack([turns.astype(np.float32), turns - turns.astype(np.float32)])
    else:
        x = rng.standard_normal(shape, np.float32)
    return to_bf16(x.astype(np.float32)) if dtype.name == "bf16" else x.astype(dtype.numpy)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Random codes with scales around 0.01."""
    count = (*shape[:-1], shape[-1] // dtype.block_size)
    out: Array = rng.integers(0, 256, (math.prod(count), dtype.nbytes), np.uint8).view(dtype.numpy).reshape(count)
    for f in dtype.fields:
        if f.unit == "f16":
            out[f.name] = 0.01 * (1 + rng.random(out[f.name].shape, np.float32))
    if dtype is MXFP4:
        out["e"] = 121
    if dtype is IQ1_M:  # its f16 scale is in the highest nibbles of four words
        out["scales"] = (out["scales"] & 0x0FFF) | 0x2000
    return out


def values(stored: Array, dtype: DType) -> Array:
    """Stored elements or blocks as float64, integers as int64."""
    if dtype is Q8_X:
        planes = np.ascontiguousarray(stored["qs"]).view(np.int8).reshape(*stored.shape, 2, 32).astype(np.float64)
        codes = RADIX * planes[..., 0, :] + planes[..., 1, :]
        return (codes * stored["d"]).reshape(*stored.shape[:-1], 32 * stored.shape[-1])
    if dtype.is_block:
        rows = np.ascontiguousarray(stored).reshape(-1).view(np.uint8).reshape(*stored.shape[:-1], stored.shape[-1] * dtype.nbytes)
        return dequantize(rows, dtype).astype(np.float64)
    if dtype in (I32, I64):
        return stored.astype(np.int64)
    return from_bf16(stored).astype(np.float64) if dtype.name == "bf16" else stored.astype(np.float64)


# Dimensions along which a result can be cut and what is left stays the same op; anything else is compared as a whole.
CUTS: Mapping[str, tuple[str, ...]] = {
    "mul_mat": ("m", "n"), "quantize_rows": ("n",), "flash_attn_ext": ("t",), "soft_max": ("r",), "rope": ("t",), "rms_norm": ("c",),
    **dict.fromkeys(("add", "mul", "scale", "cpy", "silu", "gelu", "tanh", "swiglu", "geglu"), ("c",)),
    **dict.fromkeys(("rms_norm_mul", "rms_norm_mul_add", "rms_norm_mul_quantize", "swiglu_quantize", "geglu_quantize"), ("c",)),
}


def nmse(case: OpCase, data: Mapping[str, Array], got: Array) -> float:
    """The error of the stored result `got` against the reference; infinite where NaN or infinities are in other places."""
    operands, have_stored = _cut(case, data, got)
    decoded = [values(operands[n], DTYPES[case.types[n]]) if (n := o.name) in operands else None for o in case.op.contract.operands]
    kind = DTYPES[case.types[case.op.contract.result.name]]
    with np.errstate(all="ignore"):
        want = np.asarray(case.op.reference_of(decoded, case.params), np.float64)
        want = want if kind.is_block else values(to_bf16(want) if kind.name == "bf16" else want.astype(kind.numpy), kind)
    have = values(have_stored, kind).reshape(want.shape)
    fine = np.isfinite(want)
    if not np.array_equal(have[~fine], want[~fine], equal_nan=True) or not np.isfinite(have[fine]).all():
        return math.inf
    wrong, size = float(((have[fine] - want[fine]) ** 2).sum()), float((want[fine] ** 2).sum())
    return wrong / size if size else math.inf if wrong else 0.0


def _cut(case: OpCase, data: Mapping[str, Array], got: Array) -> tuple[dict[str, Array], Array]:
    """Operands and result on a part of the rows: the first, the last, and some between."""
    operands = dict(data)
    result = case.op.contract.result
    if case.op.name == "get_rows":  # only the rows that are read
        w, ids = data["w"], np.clip(data["ids"], 0, data["w"].shape[2] - 1)
        return {"w": w[:, :, ids.reshape(-1)], "ids": np.arange(ids.size, dtype=ids.dtype).reshape(ids.shape)}, got
    for dim in CUTS.get(case.op.name, ()):
        if case.sizes.get(f"w{dim}", 1) != 1 and dim != "m":
            chosen = {dim: 0, f"w{dim}": 0}
        else:
            chosen = {dim: 0}
        some = np.unique(np.linspace(0, case.sizes[dim] - 1, N_REFERENCE).round().astype(int))
        for o in case.operands:
            for name in chosen:
                if name in o.dims:
                    operands[o.name] = np.take(operands[o.name], some, o.dims.index(name))
        got = np.take(got, some, result.dims.index(dim))
    return operands, got


# -- one row ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpRow:
    """One timed call.

    Attributes:
        variant: the kernel that ran, behind the conversion it needed.
        n_calls: calls in one run, each on operands of its own; n_runs: timed runs.
        median_us, p10_us, p90_us, min_us: of one call.
        nbytes, flop: what a perfect kernel would move and compute.
        bound: what limits it at best, "memory", "fma" or "dot8"; share: of that limit, 1 is perfect.
        nmse: the error that was found.
        compile_s: seconds compiling took, before anything was timed.
    """

    op: str
    backend: str
    types: str
    shape: str
    variant: str
    n_threads: int
    lanes: int
    n_calls: int
    n_runs: int
    median_us: float
    p10_us: float
    p90_us: float
    min_us: float
    nbytes: int
    flop: int
    gb_s: float
    gflop_s: float
    bound: str
    share: float
    nmse: float
    compile_s: float
    roofline: Roofline
    machine: Machine = field(default_factory=machine)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, one level deep, but for the reads by threads."""
        flat = {k: rounded(v) for k, v in vars(self).items() if k not in ("roofline", "machine")}
        peaks = {"read_gb_s": rounded(self.roofline.read), "fma_gflop_s": rounded(self.roofline.fma),
                 "dot8_gflop_s": rounded(self.roofline.dot8), "reads_gb_s": {str(n): rounded(v) for n, v in self.roofline.reads.items()}}
        return flat | peaks | asdict(self.machine)


def bench_op(backend: Backend, case: OpCase, roofline: Roofline, *, seconds: float = 0.2, least: int = 3, cold: bool = True) -> OpRow:
    """Time one call and compare its result.

    Args:
        seconds, least: how long and how often at least.
        cold: operands come from memory (Note [cold]); otherwise one set of them is used again and again.

    Raises:
        UnsupportedOp: the device has no kernel for it. WrongResult: the reference says something else.
    """
    data = make_data(case)
    before = compile_seconds([backend])
    prepared = prepare(backend, case, data, 2 * cache_nbytes() if cold else 0)
    compiled = compile_seconds([backend]) - before
    n_calls, variant = prepared.n_calls, prepared.variant
    timing = measure(prepared.run, seconds=seconds, least=least, calls=n_calls)
    error = nmse(case, data, prepared.get())
    if not error <= NMSE:
        raise WrongResult(f"{case} on {backend.name}: {variant} gives wrong numbers; their error (NMSE) is {error:.3g} instead of {NMSE:g}")
    call = backend.table.call(prepared.result)
    least_s, bound = roofline.bound(_read_nbytes(call), call.flop, call.weight_format is not None)
    median = timing.median
    return OpRow(op=case.op.name, backend=backend.name, types=case.type_names, shape=case.shape, variant=variant,
                 n_threads=getattr(backend, "n_threads", 0), lanes=backend.table.lanes, n_calls=n_calls, n_runs=len(timing.samples),
                 median_us=median * 1e6, p10_us=timing.quantile(0.1) * 1e6, p90_us=timing.quantile(0.9) * 1e6, min_us=timing.best * 1e6,
                 nbytes=call.nbytes, flop=call.flop, gb_s=call.nbytes / median / 1e9, gflop_s=call.flop / median / 1e9, bound=bound,
                 share=least_s / median, nmse=error, compile_s=compiled, roofline=roofline)


def prepare(backend: Backend, case: OpCase, data: Mapping[str, Array], cold_nbytes: int = 0) -> Prepared:
    """A plan of as many calls, each on operands of its own, as it takes for these to fill `cold_nbytes` (Note [cold])."""
    places = _places(backend, case)
    one = sum(places[n].nbytes_of(t) for n, t in case.leaves().items())
    nodes = []
    for _ in range(sets_of(one, cold_nbytes)):
        operands = case.leaves()
        for name, t in operands.items():
            usage = "weights" if t.dtype in WEIGHT_BLOCKS else "cache"
            place(t, places[name].allocate(max(1, places[name].nbytes_of(t)), usage))
            buffer_of(t).set(t, np.ascontiguousarray(data[name]).reshape(-1).view(np.uint8))
        nodes.append(case.node(operands))
    return plan_of(backend, nodes)


def sets_of(nbytes: int, cold_nbytes: int) -> int:
    """How many sets of operands of `nbytes` a plan should have."""
    return max(1, min(MAX_SETS, -(-cold_nbytes // max(nbytes, 1))))


def _places(backend: Backend, case: OpCase) -> dict[str, BufferType]:
    """The memory of each operand; for quantised weights the layout that a model's loader would choose."""
    leaves = case.leaves()
    node = case.node(leaves)
    found = {}
    for name, t in leaves.items():
        own = [m for m in backend.weight_types if m.layout_of(t.dtype) != "plain" and backend.supports(node, {t: m})]
        found[name] = own[0] if own and t.dtype in WEIGHT_BLOCKS else memory_of(backend)
    return found


def _read_nbytes(call: Call) -> int:
    """What has to come from memory: all that is moved, but for a result that stays in the cache (Note [cold])."""
    result = call.tensors[call.op.contract.result.name]
    if call.op.contract.writes or result is None:
        return call.nbytes
    own = result.n_elements // result.dtype.block_size * result.dtype.nbytes
    return max(0, call.nbytes - own)
