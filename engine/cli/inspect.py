"""`lanewise inspect`: what a GGUF file holds. Its tensors are listed, not read."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from engine.cli.options import add_model
from engine.cli.text import UsageError
from engine.gguf import GgufFile, read_gguf
from engine.runtime import demo_model

N_SHOWN = 8  # elements of an array, unless all are asked for
N_TEXT = 100  # characters of a text on one line


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="FILE", help="the GGUF file (default: the demo model, if it is installed)")
    add_model(parser)
    parser.add_argument("--full", action="store_true", help="whole arrays and texts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.path and args.model:
        raise UsageError("the file is given twice: as an argument and with -m")
    with read_gguf(args.path or args.model or demo_model()) as file:
        if args.json:
            json.dump(document(file, args.full), sys.stdout, ensure_ascii=False)
            sys.stdout.write("\n")
        else:
            for line in lines(file, args.full):
                sys.stdout.write(f"{line}\n")
    return 0


def document(file: GgufFile, full: bool) -> dict[str, Any]:
    """The file as plain values; a long array is its type and its first elements."""
    return {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "metadata": {key: _plain(value, file.metadata.type_of(key), full) for key, value in file.metadata.items()},
        "tensors": [
            {"name": t.name, "type": t.type_name, "shape": list(t.shape), "offset": t.offset, "nbytes": t.nbytes}
            for t in file.tensors.values()
        ],
    }


def _plain(value: Any, type: str, full: bool) -> Any:
    if not hasattr(value, "__len__") or isinstance(value, str):
        return _number(value)
    elements = value if full or len(value) <= N_SHOWN else value[:N_SHOWN]
    plain = [_number(v.item() if hasattr(v, "item") else v) for v in elements]
    return plain if len(plain) == len(value) else {"type": type, "length": len(value), "first": plain}


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text. Bytes that are no UTF-8 are shown as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def lines(file: GgufFile, full: bool) -> list[str]:
    """The file as text: a line per key and per tensor."""
    total = sum(t.nbytes for t in file.tensors.values())
    out = [f"{file.path}: GGUF version {file.version}, {len(file.metadata)} keys, {len(file.tensors)} tensors, {total} bytes of tensors"]
    for key, value in file.metadata.items():
        kind = file.metadata.type_of(key)
        out.append(f"{key} ({kind}) = {_shown(_plain(value, kind, full), full)}")
    out += [f"{t.name}: {t.type_name} {list(t.shape)}, {t.nbytes} bytes at {t.offset}" for t in file.tensors.values()]
    return out


def _shown(value: Any, full: bool) -> str:
    if isinstance(value, dict):
        return f"[{', '.join(_shown(v, full) for v in value['first'])}, ...]"
    if isinstance(value, list):
        return f"[{', '.join(_shown(v, full) for v in value)}]"
    if isinstance(value, str):
        return repr(value if full or len(value) <= N_TEXT else f"{value[:N_TEXT]}...")
    return str(value)
