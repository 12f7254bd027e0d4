"""`lanewise explain`: where each node of a model's graph runs and why, for a prompt and for a single token."""

from __future__ import annotations

import argparse
import json
import sys

from engine.cli.options import add_model, add_running
from engine.cli.session import placed, running, session
from engine.cli.text import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("-n", "--tokens", type=int, default=0, metavar="N", help="tokens of the prompt (default: a whole batch, see -ub)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_running(parser)


def run(args: argparse.Namespace) -> int:
    with session(args) as context:
        n = args.tokens or min(context.n_ubatch, context.n_ctx)
        if not 0 < n <= context.n_ctx:
            raise UsageError(f"-n {n}: 1 to {context.n_ctx} tokens fit the context")
        with running(context) as now:
            found = {"prefill": (n, context.explain(n)), "decode": (1, context.explain(1))}
            now.say(placed(context))
        if args.json:
            parts = {name: {"n_tokens": n, **explanation.to_json()} for name, (n, explanation) in found.items()}
            json.dump({"model": str(context.model.path), **parts}, sys.stdout, ensure_ascii=False)
            sys.stdout.write("\n")
        else:
            for name, (n, explanation) in found.items():
                sys.stdout.write(f"{name}, {n} token{'s' * (n != 1)}: {explanation}\n\n")
    return 0
