"""The text a command works on: an argument, a file, or standard input."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from engine.errors import LanewiseError

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


class UsageError(LanewiseError):
    """Options that do not go together, or one that is missing."""

    status = 2


def read_text(args: argparse.Namespace) -> str:
    """The text of an argument, `-p`, `-f` or standard input; exactly one of them.

    Raises:
        UsageError: none, or several. OSError: no such file.
    """
    given = [name for name in ("text", "prompt", "file") if getattr(args, name) is not None]
    if len(given) > 1:
        raise UsageError("the text is given more than once: as an argument, with -p or with -f, but not with several of them")
    if not given and sys.stdin.isatty():
        raise UsageError("there is no text: give it as an argument, with -p, with -f FILE, or on standard input")
    if args.prompt is not None:
        text = args.prompt
    elif args.file not in (None, "-"):
        text = _decoded(Path(args.file).read_bytes(), args.file)
    elif args.text not in (None, "-"):
        text = args.text
    else:
        text = _decoded(sys.stdin.buffer.read(), "standard input")
    return unescaped(text) if args.escape else text


def unescaped(text: str) -> str:
    r"""The text with \n, \r, \t, \', \" and \\ read as what they stand for; other backslashes stay."""
    return re.sub(r"\\([nrt'\"\\])", lambda m: _ESCAPES[m[1]], text)


def _decoded(raw: bytes, where: str) -> str:
    """A whole file as text, without the newline that ends it."""
    try:
        return raw.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start})") from None
