"""`lanewise devices`: every backend and device of this machine, and why an absent one is absent."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from engine.runtime import devices


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="show the devices for tests too, behind the others")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    rows = [r for r in devices() if args.all or r["type"] != "TEST"]
    numbered = [{"index": i if r["available"] else None, **r} for i, r in enumerate(sorted(rows, key=_rank))]
    if args.json:
        json.dump(numbered, sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join(f"{_line(r)}\n" for r in numbered))
    return 0


def _rank(row: dict[str, Any]) -> int:
    """Usable devices come first, those for tests behind them, absent ones last; otherwise as the registry orders them."""
    return 2 if not row["available"] else int(row["type"] == "TEST")


def _line(row: dict[str, Any]) -> str:
    if not row["available"]:
        return f"-  {row['name']}: unavailable, because {row['reason']}"
    memory = f", {_size(row['total'])} ({_size(row['free'])} free)" if row["total"] is not None else ""
    able = ", ".join(name.replace("_", " ") for name, has in row["capabilities"].items() if has)
    used = "" if row["default"] else "; used only when named"
    return f"{row['index']}  {row['name']} [{row['type']}]: {row['description']}{memory}{f'; {able}' if able else ''}{used}"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / (1 << 20):.0f} MiB"
