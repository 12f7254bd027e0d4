"""`lanewise tokenize`: text to token ids. A file with a vocabulary is enough; it needs no tensors."""

from __future__ import annotations

import argparse
import json
import sys

from engine.cli.options import add_model, add_text
from engine.cli.text import read_text
from engine.gguf import read_gguf
from engine.runtime import demo_model
from engine.settings import settings
from engine.tokenizer import Tokenizer


def add_options(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    add_model(parser)
    parser.add_argument("--ids", action="store_true", help="print a list of the ids alone")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--no-bos", action="store_true", help="leave out the tokens a model wants before and behind a text")
    parser.add_argument("--no-parse-special", action="store_true", help="read the text of control tokens as plain text")


def run(args: argparse.Namespace) -> int:
    text = read_text(args)
    path = args.model or demo_model()
    with read_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, settings().cache_dir / "tokenizers")
    ids = tokenizer.encode(text, add_special=not args.no_bos, parse_special=not args.no_parse_special)
    pieces = [tokenizer.token_bytes(i, special=True).decode("utf-8", "backslashreplace") for i in ids]
    if args.json:
        json.dump({"model": str(path), "text": text, "tokens": ids, "pieces": pieces}, sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
    elif args.ids:
        sys.stdout.write(f"{ids}\n")
    else:
        sys.stdout.write("".join(f"{i:6} -> {piece!r}\n" for i, piece in zip(ids, pieces, strict=True)))
    return 0
