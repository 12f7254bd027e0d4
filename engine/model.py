"""A loaded model and its contexts: tokens in, logits out."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from engine.backend import Backend
from engine.dtypes import DType
from engine.errors import ClosedError, ContextError, InterruptedRun
from engine.gguf import GgufFile, read_gguf
from engine.graph import Graph
from engine.models import architecture
from engine.models.blocks import Inputs, Parts
from engine.models.cache import N_UBATCH, KvCache, kv_dtype
from engine.models.hparams import Hparams, read_hparams
from engine.models.weights import Weights
from engine.sched.alloc import Pool
from engine.sched.execute import Executable, Stage
from engine.sched.explain import Explanation
from engine.settings import settings
from engine.tokenizer import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)
N_GRAPHS = 6  # graphs a context keeps ready


class Model:
    """Weights, hyperparameters and tokeniser of one GGUF file on some backends. Use it in `with`, or `close()` it.

    Attributes:
        path: the file. metadata: its keys, as plain values. hparams: what the graph is built from.
        backends: best first, the CPU last.
        load_s: seconds loading took.
    """

    def __init__(self, path: str | Path, backends: Sequence[Backend], *, flash: bool = True, chat_template: str | None = None,
                 strict: bool = False, allowed: Sequence[Backend] | None = None, on_close: Callable[[], None] | None = None) -> None:
        """Read and place a model; with `strict`, nodes run on `allowed` only (all but the CPU where that is not given).

        Raises:
            GgufError: no readable file. ModelError: a file that cannot be run.
        """
        started = time.perf_counter()
        self.path, self.backends, self.strict, self.allowed = Path(path), tuple(backends), strict, allowed
        self._on_close, self._closed = on_close, False
        self._contexts: list[Context] = []
        self._default: Context | None = None
        self._file: GgufFile = read_gguf(path)
        try:
            self._read(flash, chat_template)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    def _read(self, flash: bool, chat_template: str | None) -> None:
        self.metadata = self._file.metadata
        self._arch = architecture(str(self.metadata.get("general.architecture", "")))
        self.tokenizer = Tokenizer.from_metadata(self.metadata, settings().cache_dir / "tokenizers")
        n_vocab = self._n_vocab()
        self.hparams: Hparams = read_hparams(self.metadata, n_vocab, self._arch.WINDOW_PATTERN)
        self.weights = Weights(self._file, self.backends)
        self.parts = Parts(self.hparams, self.weights, self._arch.NEOX, flash)
        own = self.metadata.get("tokenizer.chat_template")
        self._chat_source = chat_template or (own if isinstance(own, str) else None)
        self._probe()
        self._give_back()

    def _n_vocab(self) -> int:
        found = self._file.tensors.get("token_embd.weight")
        return found.shape[0] if found is not None and len(found.shape) == 2 else self.tokenizer.n_vocab

    def _probe(self) -> None:
        """Build a graph once: every weight is found, checked and placed before anything runs."""
        h, f16 = self.hparams, kv_dtype("f16")
        homes = [self.cache_home(f16, f16)] * h.n_layer
        self._arch.build(self.parts, Inputs(1, 256, 256, 1), KvCache(h, 256, 1, f16, f16, homes))
        log.info("%s: %s on %s", self.path.name, self.description, ", ".join(b.name for b in self.backends))

    def cache_home(self, type_k: DType, type_v: DType) -> Backend:
        """The first backend that runs everything which touches a KV cache of these types in its memory; the floor where none does."""
        h, floor = self.hparams, self.backends[-1]
        for backend in [b for b in self.backends if b.buffer_type is not floor.buffer_type]:
            cache = KvCache(h, 256, 1, type_k, type_v, [backend] * h.n_layer)
            graph = Graph([self._arch.build(self.parts, Inputs(1, 256, 256, 1), cache)])
            mine = {*cache.keys, *cache.values}
            touching = [t for t in graph.nodes if not t.is_view_op and any(s is not None and s.root in mine for s in t.srcs)]
            if all(backend.supports(t) for t in touching):
                return backend
        return floor

    def _give_back(self) -> None:
        """Let go of what only loading needed: decoded metadata, pages of the file, the C library's free memory."""
        self.metadata.forget()
        self._file.release()
        with suppress(AttributeError, OSError):  # glibc has it
            ctypes.CDLL(None).malloc_trim(0)

    @property
    def description(self) -> str:
        """One line: name, architecture, layers, bytes of weights."""
        h = self.hparams
        held = self.weights.packed_nbytes + self.weights.mapped_nbytes
        return f"{h.name or self.path.stem}, {h.architecture}, {h.n_layer} layers, {held / 1e6:.0f} MB of weights"

    # -- text ---------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. Raises TokenizerError if the model has no tokeniser."""
        self._require_open()
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of token ids; control tokens only with `special`."""
        self._require_open()
        return self.tokenizer.decode(tokens, special=special)

    def chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's chat template writes it. Raises ChatTemplateError if the file has none."""
        self._require_open()
        template = ChatTemplate(self._chat_source, self.tokenizer.bos_token, self.tokenizer.eos_token)
        return template.render(list(messages), add_generation_prompt=add_generation_prompt)

    # -- running ------------------------------------------------------------------------------------------------

    def context(self, n_ctx: int = 0, kv_type: str = "f16", kv_type_k: str | None = None, kv_type_v: str | None = None,
                threads: int = 0, n_ubatch: int = N_UBATCH) -> Context:
        """A context of `n_ctx` tokens (0: the model's own length) with its own KV cache.

        Raises:
            ContextError: a size or type that is not possible.
        """
        self._require_open()
        made = Context(self, n_ctx, kv_type_k or kv_type, kv_type_v or kv_type, threads, n_ubatch)
        self._contexts.append(made)
        return made

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Any:
        """Generate from a prompt: an iterable of text pieces. Options as `engine.generate.Generation` takes them.

        The model's own context is used unless `context` is given, and starts over with each call.
        """
        from engine.generate import Generation

        self._require_open()
        context = options.pop("context", None)
        if context is None:
            if self._default is None:
                self._default = self.context()
            context = self._default
            context.reset()
        return Generation(context, prompt, **options)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the model {self.path.name} is closed")

    def close(self) -> None:
        """Give memory, file and threads back. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        for context in list(self._contexts):
            context.close()
        self._default = None
        self.weights = self.parts = None  # type: ignore[assignment]
        self._file.close()
        if self._on_close:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ready:
    """A graph made ready for batches of one shape."""

    def __init__(self, context: Context, n: int, n_kv: int, n_ring: int, n_out: int) -> None:
        model = context.model
        self.inputs = Inputs(n, n_kv, n_ring, n_out)
        self.logits = model._arch.build(model.parts, self.inputs, context.cache)
        graph = Graph([self.logits])
        self.used = set(graph.inputs)
        self.executable = Executable(model.backends, graph, pool=context.pool, strict=model.strict, allowed=model.allowed,
                                     id_limits={self.inputs.tokens: model.hparams.n_vocab})


class Context:
    """One sequence of up to `n_ctx` tokens on a model: `decode` continues where the last call ended.

    Attributes:
        n_ctx: tokens it holds. n_past: tokens it has seen. threads: of the CPU, 0 for all allowed cores.
        build_s: seconds spent building graphs and compiling kernels.
        trace: is given each split to run, to watch it; None for none.
    """

    trace: Callable[[Stage], None] | None = None

    def __init__(self, model: Model, n_ctx: int, kv_type_k: str, kv_type_v: str, threads: int, n_ubatch: int) -> None:
        h = model.hparams
        if not isinstance(n_ctx, int) or not 0 <= n_ctx < 1 << 31:
            raise ContextError(f"a context of {n_ctx!r} tokens: 1 or more are possible, 0 for the model's own {h.n_ctx_train}")
        if not isinstance(n_ubatch, int) or n_ubatch < 1:
            raise ContextError(f"a batch of {n_ubatch!r} tokens: 1 or more are possible")
        self.model, self.threads, self.n_ubatch = model, threads, n_ubatch
        self.n_ctx = n_ctx or h.n_ctx_train
        self.n_past, self.build_s = 0, 0.0
        type_k, type_v = kv_dtype(kv_type_k), kv_dtype(kv_type_v)
        homes = [model.cache_home(type_k, type_v)] * h.n_layer
        self.cache = KvCache(h, self.n_ctx, n_ubatch, type_k, type_v, homes)
        self.pool = Pool()
        self._graphs: OrderedDict[tuple[int, int, int, int], _Ready] = OrderedDict()
        self._closed = self._interrupted = False

    def decode(self, tokens: Sequence[int] | np.ndarray, logits: Literal["last", "all"] = "last") -> np.ndarray:
        """Run tokens through the model: float32 [n_vocab] after the last one, or [n_tokens, n_vocab].

        Raises:
            ContextError: no tokens, an id outside the vocabulary, or more than the context holds; nothing has changed then.
            InterruptedRun: stopped by `interrupt()`; the context is as it was before the call, or empty (see `rewind`).
        """
        ids = self._checked(tokens, logits)
        for backend in self.model.backends:
            backend.set_threads(self.threads)
        start, rows, self._interrupted = self.n_past, [], False
        try:
            for at in range(0, len(ids), self.n_ubatch):
                part = ids[at : at + self.n_ubatch]
                last = at + self.n_ubatch >= len(ids)
                rows.append(self._batch(part, len(part) if logits == "all" else 1 if last else 0))
                if self._interrupted:  # between two batches, where no backend hears it
                    raise InterruptedRun("the run was interrupted")
        except BaseException:
            self.rewind(start)
            raise
        return np.concatenate(rows) if logits == "all" else rows[-1][-1]

    def _checked(self, tokens: Sequence[int] | np.ndarray, logits: str) -> np.ndarray:
        self._require_open()
        if logits not in ("last", "all"):
            raise ContextError(f"logits={logits!r}: 'last' or 'all' are possible")
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ContextError(f"decode was given {'no tokens' if ids.size == 0 else f'an array of {ids.dtype}{list(ids.shape)}'}: "
                               "a list of one or more token ids is expected")
        n_vocab = self.model.hparams.n_vocab
        if (wrong := ids[(ids < 0) | (ids >= n_vocab)]).size:
            raise ContextError(f"token id {wrong[0]} is outside the vocabulary of {n_vocab}")
        if self.n_past + ids.size > self.n_ctx:
            raise ContextError(f"{ids.size} more tokens do not fit: {self.n_past} of {self.n_ctx} are used; reset(), or take a larger "
                               "context (-c)")
        return ids.astype(np.int32)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the context is closed")

    def _batch(self, ids: np.ndarray, n_out: int) -> np.ndarray:
        """One micro-batch; logits of its last `n_out` tokens (none are computed for 0: then of one, unused)."""
        n, positions = len(ids), np.arange(self.n_past, self.n_past + len(ids), dtype=np.int32)
        full, ring = self.cache.full, self.cache.ring
        n_kv, n_ring = full.visible(self.n_past, n), ring.visible(self.n_past, n)
        ready = self._ready(n, n_kv, n_ring, max(1, n_out))
        full.write(positions)
        if any(self.model.hparams.windowed):
            ring.write(positions)
        i = ready.inputs
        values = {i.tokens: ids, i.positions: positions, i.outputs: np.arange(n - max(1, n_out), n, dtype=np.int32)}
        for windowed, cells, size in ((False, full, n_kv), (True, ring, n_ring)):
            if i.masks[windowed] in ready.used:
                values[i.cells[windowed]] = cells.place(positions)
                values[i.masks[windowed]] = cells.mask(positions, size)
        for tensor in ready.used:
            ready.executable.set(tensor, values[tensor])
        ready.executable.trace = self.trace
        ready.executable.run()
        self.n_past += n
        return ready.executable.get(ready.logits) if n_out else np.empty((0, self.model.hparams.n_vocab), np.float32)

    def _ready(self, *shape: *tuple[int, int, int, int]) -> _Ready:
        """The graph for batches of this shape, built or from those kept."""
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            return self._graphs[shape]
        started = time.perf_counter()
        while len(self._graphs) >= N_GRAPHS:
            self._graphs.popitem(last=False)[1].executable.close()
        self._graphs[shape] = _Ready(self, *shape)
        self.build_s += time.perf_counter() - started
        return self._graphs[shape]

    def rewind(self, n: int) -> None:
        """Keep the first `n` tokens; none where layers with a sliding window no longer hold what token `n` would see: look at `n_past`.

        Raises:
            ContextError: the context has seen fewer than `n` tokens.
        """
        self._require_open()
        if not 0 <= n <= self.n_past:
            raise ContextError(f"the first {n} tokens cannot be kept: the context has {self.n_past}")
        h = self.model.hparams
        if any(h.windowed) and not self.cache.ring.holds(range(max(0, n - h.window + 1), n)):
            n = 0
        for cells in (self.cache.full, self.cache.ring):
            cells.forget(n)
        self.n_past = n

    def reset(self) -> None:
        """Start over with an empty context."""
        self.rewind(0)

    def interrupt(self) -> None:
        """Make a `decode` in progress stop early, from any thread or a signal handler."""
        self._interrupted = True
        for backend in self.model.backends:
            backend.interrupt()

    def explain(self, n: int = 1) -> Explanation:
        """Where each node of a batch of `n` tokens runs, and why."""
        return self._executable(n).explain()

    def graph(self, n: int = 1) -> Graph:
        """The graph of a batch of `n` tokens, with its weights."""
        return self._executable(n).graph

    def _executable(self, n: int) -> Executable:
        self._require_open()
        return self._ready(n, self.cache.full.visible(self.n_past, n), self.cache.ring.visible(self.n_past, n), 1).executable

    def close(self) -> None:
        """Give the cache and the compute memory back. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        for ready in self._graphs.values():
            ready.executable.close()
        self._graphs.clear()
        self.pool.clear()
        self.cache = None  # type: ignore[assignment]
        self.model._contexts.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
