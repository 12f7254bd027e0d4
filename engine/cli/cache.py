"""`lanewise cache`: compiled kernels kept on disk, for each kind of device: where, how many, how large; remove them, or make a model's."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from engine.cli.options import add_running
from engine.cli.session import note, running, session
from engine.cli.text import UsageError
from engine.model import Context
from engine.object_cache import ObjectCache
from engine.settings import settings

FOLDERS = {"kernels": "for the CPU", "opencl": "for OpenCL devices", "cuda": "for CUDA devices"}  # under the cache's folder
WARM = (512, 256, 64, 32, 16, 8, 7, 6, 5, 4, 3, 2, 1)  # batch sizes between which kernels change


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove every compiled kernel")
    parser.add_argument("--warm", dest="model", metavar="MODEL", help="compile what this model needs ('demo' for the demo model)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_running(parser)


def run(args: argparse.Namespace) -> int:
    caches = {name: ObjectCache(settings().cache_dir / name, settings().cache_limit_mb << 20) for name in FOLDERS}
    if args.clear and args.model:
        raise UsageError("--clear and --warm do not go together")
    if args.clear:
        note(f"{sum(c.clear() for c in caches.values())} entries removed")
    if args.model:
        args.model = None if args.model == "demo" else args.model
        with session(args) as context, running(context):
            note(f"{_warm(context)} kernels compiled for {context.model.description}")
    rows: list[dict[str, Any]] = []
    for name, kept in caches.items():
        sizes = [nbytes for _, nbytes, _ in kept.entries()]
        rows.append({"folder": str(kept.folder), "what": FOLDERS[name], "entries": len(sizes), "nbytes": sum(sizes), "limit": kept.limit})
    if args.json:
        whole = {"entries": sum(r["entries"] for r in rows), "nbytes": sum(r["nbytes"] for r in rows)}
        json.dump({"folder": str(settings().cache_dir), **whole, "folders": rows}, sys.stdout)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join("{folder}: {entries} entries {what}, {:.1f} MB of at most {:.0f} MB\n".format(
            r["nbytes"] / 1e6, r["limit"] / 1e6, **r) for r in rows))
    return 0


def _warm(context: Context) -> int:
    """Make every kernel for batches of any size; gives how many were compiled."""
    compilers = [c for b in context.model.backends if (c := getattr(b, "compiler", None)) is not None]
    before = sum(c.compiled for c in compilers)
    for n in sorted({min(n, context.n_ubatch, context.n_ctx) for n in WARM}, reverse=True):
        context.explain(n)
    context.decode([0])  # the executor itself
    return sum(c.compiled for c in compilers) - before
