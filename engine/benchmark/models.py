"""Rows of `lanewise bench model`: tokens per second of a whole model, measured as llama-bench does."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from engine.backend import DeviceType
from engine.benchmark.timing import Machine, Timing, WrongResult, compile_seconds, machine, rounded
from engine.model import Context, Model

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ModelTest:
    """A prompt of `n_prompt` tokens, then `n_gen` tokens one by one, in a context that holds `n_depth` already."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_ctx(self) -> int:
        return self.n_prompt + self.n_gen + self.n_depth

    def __str__(self) -> str:
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True)
class ModelRow:
    """One test of one model, with llama-bench's names for what it has too.

    Attributes:
        model_size: bytes of the file's tensors. n_gpu_layers ... embeddings: what llama-bench records, as it is in force here.
        avg_ns, stddev_ns, avg_ts, stddev_ts: over the repetitions, nanoseconds and tokens per second; median_ts, best_ts too.
        checksum: of the last logits; equal numbers have equal sums, whatever the number of threads.
        compile_s: seconds spent compiling kernels, part of no sample. load_s: of loading the model.
    """

    backends: str
    gpu_info: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    flash_attn: int
    devices: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    median_ts: float
    best_ts: float
    checksum: str
    compile_s: float
    load_s: float
    lanes: int
    n_gpu_layers: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    no_kv_offload: bool = False
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    no_op_offload: bool = False
    cpu_mask: str = "0x0"
    cpu_strict: bool = False
    embeddings: bool = False
    machine: Machine = field(default_factory=machine)

    @property
    def test(self) -> str:
        return str(ModelTest(self.n_prompt, self.n_gen, self.n_depth))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; the samples are lists."""
        own = {k: list(v) if isinstance(v, tuple) else rounded(v) for k, v in vars(self).items() if k != "machine"}
        return asdict(self.machine) | own


def bench_model(context: Context, test: ModelTest, *, repetitions: int = 5, warmup: bool = True, n_batch: int = 2048,
                seed: int = 0) -> ModelRow:
    """Time one test as llama-bench does: a warm-up, then repetitions from a context of `n_depth` tokens, with random token ids.

    Raises:
        ContextError: it does not fit the context. WrongResult: logits that are no numbers.
    """
    model, started = context.model, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    compiled = compile_seconds(model.backends)
    runner = _Runner(context, n_batch, seed)
    if warmup:
        runner.at(test.n_depth)
        runner.feed(test.n_prompt)
        runner.feed_singly(min(1, test.n_gen))
    samples = []
    for _ in range(repetitions):
        runner.at(test.n_depth)
        samples.append(runner.timed(test))
    runner.check()
    n = test.n_prompt + test.n_gen
    timing, rates = Timing(tuple(samples)), Timing(tuple(n / s for s in samples))
    return ModelRow(
        **_facts(context), n_batch=n_batch, n_prompt=test.n_prompt, n_gen=test.n_gen, n_depth=test.n_depth, test_time=started,
        avg_ns=round(timing.mean * 1e9), stddev_ns=round(timing.stddev * 1e9), avg_ts=rates.mean, stddev_ts=rates.stddev,
        samples_ns=tuple(round(s * 1e9) for s in samples), samples_ts=tuple(round(r, 3) for r in rates.samples), median_ts=rates.median,
        best_ts=max(rates.samples), checksum=f"{zlib.crc32(runner.logits.tobytes()):08x}",
        compile_s=compile_seconds(model.backends) - compiled)


@dataclass
class _Runner:
    """Feeds a context with random tokens."""

    context: Context
    n_batch: int
    seed: int
    logits: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    _tokens: dict[int, Array] = field(default_factory=dict)

    def tokens(self, n: int) -> Array:
        """Ids of the same `n` tokens each time; the first is the begin token where the model wants one."""
        if n not in self._tokens:
            ids = np.random.default_rng([self.seed, n]).integers(0, self.context.model.hparams.n_vocab, n)
            tokenizer = self.context.model.tokenizer
            if n and tokenizer.add_bos and tokenizer.bos_id is not None:
                ids[0] = tokenizer.bos_id
            self._tokens[n] = ids
        return self._tokens[n]

    def at(self, n: int) -> None:
        """Bring the context to its first `n` tokens, computed again only where they are lost."""
        if self.context.n_past > n:
            self.context.rewind(n)
        if self.context.n_past != n:
            self.context.reset()
            self.feed(n)

    def feed(self, n: int) -> None:
        ids = self.tokens(n)
        for at in range(0, n, self.n_batch):
            self.logits = self.context.decode(ids[at : at + self.n_batch])

    def feed_singly(self, n: int) -> None:
        for token in self.tokens(n):
            self.logits = self.context.decode([int(token)])

    def timed(self, test: ModelTest) -> float:
        """Seconds, without those spent compiling."""
        backends = self.context.model.backends
        compiled, started = compile_seconds(backends), time.perf_counter()
        self.feed(test.n_prompt)
        self.feed_singly(test.n_gen)
        return time.perf_counter() - started - (compile_seconds(backends) - compiled)

    def check(self) -> None:
        if not np.isfinite(self.logits).all():
            raise WrongResult(f"{self.context.model.path.name}: the logits hold NaN or infinities; `lanewise check` finds the kernel")


def _facts(context: Context) -> dict[str, Any]:
    """What a row says of the model and of where it runs."""
    model = context.model
    floor = model.backends[-1]
    gpus = [b.device.description for b in model.backends if b.device.type in (DeviceType.GPU, DeviceType.IGPU)]
    tensors = model.weights.file.tensors.values()
    threads = context.threads
    floor.set_threads(threads)
    return {"backends": ",".join(b.name.upper() for b in model.backends), "gpu_info": ", ".join(gpus), "model_filename": str(model.path),
            "model_type": model_type(model), "model_size": sum(t.nbytes for t in tensors),
            "model_n_params": sum(math.prod(t.shape) for t in tensors), "n_ubatch": context.n_ubatch,
            "n_threads": getattr(floor, "n_threads", threads), "type_k": context.cache.keys[0].dtype.name,
            "type_v": context.cache.values[0].dtype.name, "flash_attn": int(model.parts.flash),
            "devices": "/".join(b.name for b in model.backends), "load_s": model.load_s, "lanes": floor.table.lanes}


def model_type(model: Model) -> str:
    """Architecture, size and the types that hold a tenth of the bytes or more: "llama 135M Q4_1+Q8_0"."""
    held: Counter[str] = Counter()
    n_params = 0
    for t in model.weights.file.tensors.values():
        held[t.type_name] += t.nbytes
        n_params += math.prod(t.shape)
    size = f"{n_params / 1e9:.2f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"
    kinds = "+".join(name.upper() for name, nbytes in held.most_common() if nbytes >= 0.1 * held.total())
    return f"{model.hparams.architecture} {size} {kinds}"


def decode_nbytes(model: Model, n_depth: int, kv_nbytes: int = 2) -> int:
    """Bytes a perfect engine reads for one token at a context of `n_depth`: the weights of all products once, and K and V once."""
    h, tensors = model.hparams, model.weights.file.tensors
    untied = "output.weight" in tensors
    weights = sum(t.nbytes for name, t in tensors.items() if not (untied and name == "token_embd.weight"))
    seen = sum(min(n_depth, h.window) if windowed else n_depth for windowed in h.windowed)
    return weights + seen * h.n_head_kv * (h.head_k + h.head_v) * kv_nbytes
