"""Prefill and decode of one model side by side with llama.cpp: alternating rounds on one machine, ratios of medians.

    python bench/peer.py MODEL.gguf --peer-python /path/to/venv/bin/python [-t 2] [-p 512] [-n 64] [-r 5]

The peer's Python needs `llama-cpp-python`; it is driven through its low-level API, `llama_decode` on the same batches. Each engine lives in
a process of its own and works only when it is asked, so that the two never run at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def ours(path: str, threads: int):
    from engine.runtime import load

    model = load(path, threads=threads)
    context = model.context(n_ctx=2048, threads=threads)
    n_vocab = model.hparams.n_vocab

    def prefill(n: int) -> None:
        context.reset()
        context.decode([(7 * i + 11) % n_vocab for i in range(n)])

    def decode(n: int) -> None:
        for i in range(n):
            context.decode([(13 * i + 5) % n_vocab])

    return prefill, decode


def llama_cpp(path: str, threads: int):
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 2048, 2048, 512, threads, threads
    context = ll.llama_init_from_model(model, params)
    n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(2048, 0, 1)
    state = {"past": 0, "log": quiet}
    print(ll.llama_print_system_info().decode(), file=sys.stderr)

    def run(tokens: list[int]) -> None:
        batch.n_tokens = len(tokens)
        for i, t in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = t, state["past"] + i, 1, 0
            batch.logits[i] = i == len(tokens) - 1
        assert ll.llama_decode(context, batch) == 0
        ll.llama_synchronize(context)
        ll.llama_get_logits_ith(context, -1)
        state["past"] += len(tokens)

    def prefill(n: int) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        state["past"] = 0
        run([(7 * i + 11) % n_vocab for i in range(n)])

    def decode(n: int) -> None:
        for i in range(n):
            run([(13 * i + 5) % n_vocab])

    return prefill, decode


def serve(engine: str, path: str, threads: int) -> None:
    """Answer "pp N" and "tg N" on stdin with seconds on stdout."""
    prefill, decode = (ours if engine == "lanewise" else llama_cpp)(path, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        what, n = line.split()
        started = time.perf_counter()
        (prefill if what == "pp" else decode)(int(n))
        print(time.perf_counter() - started, flush=True)


class Peer:
    def __init__(self, python: str, engine: str, path: str, threads: int) -> None:
        self.process = subprocess.Popen([python, __file__, path, "--serve", engine, "-t", str(threads)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        assert self.process.stdout and self.process.stdin
        self.process.stdout.readline()

    def ask(self, what: str, n: int) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what} {n}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("--serve", choices=("lanewise", "llama.cpp"))
    p.add_argument("--peer-python", default=sys.executable)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("-p", "--n-prompt", type=int, default=512)
    p.add_argument("-n", "--n-gen", type=int, default=64)
    p.add_argument("-r", "--rounds", type=int, default=5)
    a = p.parse_args()
    if a.serve:
        serve(a.serve, a.model, a.threads)
        return
    peers = {"lanewise": Peer(sys.executable, "lanewise", a.model, a.threads),
             "llama.cpp": Peer(a.peer_python, "llama.cpp", a.model, a.threads)}
    seconds: dict[str, dict[str, list[float]]] = {name: {"pp": [], "tg": []} for name in peers}
    for r in range(a.rounds + 1):
        for name, peer in peers.items():
            for what, n in (("pp", a.n_prompt), ("tg", a.n_gen)):
                s = peer.ask(what, n)
                if r:  # the first round warms up
                    seconds[name][what].append(s)
    rows = {}
    for what, n in (("pp", a.n_prompt), ("tg", a.n_gen)):
        tps = {name: n / statistics.median(seconds[name][what]) for name in peers}
        ratios = [b / o for o, b in zip(seconds["lanewise"][what], seconds["llama.cpp"][what], strict=True)]
        rows[f"{what}{n}"] = {**{k: round(v, 1) for k, v in tps.items()}, "ratio": round(statistics.median(ratios), 3),
                              "ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3)}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
