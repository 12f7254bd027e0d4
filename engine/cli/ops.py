"""`lanewise ops`: the live matrix op x types x backend, read from the kernel tables; with `--missing`, what a model would need."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from engine.backend import Backend, DeviceType, KernelTable, ThroughRow
from engine.cli.text import UsageError
from engine.op import Key, Op
from engine.runtime import load, ops, registry
from engine.tensor import Tensor

Row = dict[str, Any]
N_PREFILL = 32  # tokens of the prompt whose graph is asked for with --missing


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-b", "--backend", metavar="NAMES", help="devices, with commas (default: all this machine has, but those for tests)")
    add("-o", "--op", metavar="NAMES", help="only these ops, with commas")
    add("--missing", metavar="MODEL", help="a GGUF file: list only what the devices would have to run and do not")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print one JSON document")
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="print comma-separated values")
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="print a Markdown table")


def run(args: argparse.Namespace) -> int:
    found = registry()
    try:
        backends = found.select(args.backend, strict=True) if args.backend else [b for b in found.all
                                                                               if b.device.type is not DeviceType.TEST]
        if args.missing:
            return _missing(args.missing, backends, args.form)
        rows = matrix(_ops(args.op), backends)
    finally:
        found.close()
    _WRITERS[args.form or "table"](rows, sys.stdout)
    return 0


def _ops(names: str | None) -> list[Op]:
    asked = [n.strip() for n in (names or "").split(",") if n.strip()]
    if unknown := [n for n in asked if n not in ops()]:
        raise UsageError(f"there is no op {unknown[0]!r}: {', '.join(ops())} are known")
    return [ops()[n] for n in asked] if asked else list(ops().values())


# -- the matrix -------------------------------------------------------------------------------------------------


def matrix(ops: Sequence[Op], backends: Sequence[Backend]) -> list[Row]:
    """A row for each op and each combination of types that some table has: the variants each backend runs it by, fastest first."""
    rows = []
    for op in ops:
        for key in dict.fromkeys(key for b in backends for key in b.table.keys_of(op)):
            operands = [o.name for o in op.contract.views]
            rows.append({"op": op.name, "types": dict(zip(operands, key[1], strict=True)),
                         **{b.name: variants(b.table, key) for b in backends}})
    return rows


def variants(table: KernelTable, key: Key) -> list[str]:
    """Names of a key's rows; a conversion is shown once, before the rows that follow it."""
    out = []
    for row in table.rows.get(key, ()):
        out += [f"{row.convert.name} + {inner.name}" for inner in row.inner] if isinstance(row, ThroughRow) else [row.name]
    return out


def _cells(row: Row) -> list[str]:
    types = ", ".join(f"{operand} {name}" for operand, name in row["types"].items())
    return [row["op"], types, *(", ".join(have) or "-" for name, have in row.items() if name not in ("op", "types"))]


def _header(rows: Sequence[Row]) -> list[str]:
    return list(rows[0]) if rows else ["op", "types"]


def write_table(rows: Sequence[Row], out: TextIO) -> None:
    lines = [_header(rows), *(_cells(r) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        out.write("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() + "\n")


def write_markdown(rows: Sequence[Row], out: TextIO) -> None:
    header = _header(rows)
    for line in (header, ["---"] * len(header), *(_cells(r) for r in rows)):
        out.write(f"| {' | '.join(line)} |\n")


def write_csv(rows: Sequence[Row], out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_header(rows))
    writer.writerows(_cells(r) for r in rows)


def write_json(rows: Sequence[Row], out: TextIO) -> None:
    json.dump(list(rows), out)
    out.write("\n")


_WRITERS: dict[str, Callable[[Sequence[Row], TextIO], None]] = {
    "table": write_table, "markdown": write_markdown, "csv": write_csv, "json": write_json}


# -- what a model would need ------------------------------------------------------------------------------------


def _missing(path: str, backends: Sequence[Backend], form: str | None) -> int:
    """Calls of a model's graphs, for a prompt and for one token, that a device refuses, each with its reason."""
    if form in ("csv", "markdown"):
        raise UsageError(f"--missing prints text or --json, not --{form}")
    rows: dict[tuple[str, ...], Row] = {}
    with load(path, devices="none") as model, model.context(min(256, model.hparams.n_ctx_train)) as context:
        for n in (min(N_PREFILL, context.n_ctx), 1):
            for node in context.graph(n).nodes:
                if node.op is None or node.is_view_op:
                    continue
                for b in backends:
                    if why := _refusal(b, node):
                        row = rows.setdefault((b.name, node.op.name, *node.types, why), {
                            "backend": b.name, "op": node.op.name, "types": list(node.types), "reason": why, "n_nodes": 0})
                        row["n_nodes"] += 1
    if form == "json":
        json.dump({"model": path, "missing": list(rows.values())}, sys.stdout)
        sys.stdout.write("\n")
    else:
        for r in rows.values():
            sys.stdout.write(f"{r['backend']} {r['op']}({', '.join(r['types'])}): {r['n_nodes']} nodes: {r['reason']}\n")
        if not rows:
            sys.stdout.write(f"nothing: every node of {path} runs on {', '.join(b.name for b in backends)}\n")
    return 0


def _refusal(backend: Backend, node: Tensor) -> str:
    """Why a device does not run a node wherever the weights lie in its own kinds of memory, or nothing."""
    weights = [s.root for s in node.srcs if s is not None and s.is_weight]
    answers = [backend.supports(node, dict.fromkeys(weights, where)) for where in backend.weight_types]
    return "" if any(answers) else answers[0].reason
