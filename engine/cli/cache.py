"""`lanewise cache`: the compiled kernels kept on disk: where, how many, how large; remove them, or make those a model needs."""

from __future__ import annotations

import argparse
import json
import sys

from engine.cli.options import add_running
from engine.cli.session import note, running, session
from engine.cli.text import UsageError
from engine.model import Context
from engine.object_cache import ObjectCache
from engine.settings import settings

WARM = (512, 256, 64, 32, 16, 8, 7, 6, 5, 4, 3, 2, 1)  # batch sizes between which kernels change


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove every compiled kernel")
    parser.add_argument("--warm", dest="model", metavar="MODEL", help="compile what this model needs ('demo' for the demo model)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_running(parser)


def run(args: argparse.Namespace) -> int:
    kept = ObjectCache(settings().cache_dir / "kernels", settings().cache_limit_mb << 20)
    if args.clear and args.model:
        raise UsageError("--clear and --warm do not go together")
    if args.clear:
        note(f"{kept.clear()} entries removed")
    if args.model:
        args.model = None if args.model == "demo" else args.model
        with session(args) as context, running(context):
            note(f"{_warm(context)} kernels compiled for {context.model.description}")
    sizes = [nbytes for _, nbytes, _ in kept.entries()]
    if args.json:
        json.dump({"folder": str(kept.folder), "entries": len(sizes), "nbytes": sum(sizes), "limit": kept.limit}, sys.stdout)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(f"{kept.folder}: {len(sizes)} entries, {sum(sizes) / 1e6:.1f} MB of at most {kept.limit / 1e6:.0f} MB\n")
    return 0


def _warm(context: Context) -> int:
    """Make every kernel for batches of any size; gives how many were compiled."""
    compilers = [c for b in context.model.backends if (c := getattr(b, "compiler", None)) is not None]
    before = sum(c.compiled for c in compilers)
    for n in sorted({min(n, context.n_ubatch, context.n_ctx) for n in WARM}, reverse=True):
        context.explain(n)
    context.decode([0])  # the executor itself
    return sum(c.compiled for c in compilers) - before
