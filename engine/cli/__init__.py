"""The command line: one file per command. stdout carries results, everything else goes to stderr.

Exit status: 0 done, 1 the work failed, 2 wrong usage, 130 stopped by Ctrl-C. Every error of ours is one line; a traceback is a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

from engine import __version__

# name -> what it does. Each is a module of this package with `add_options` and `run`, imported when it is the one asked for.
COMMANDS = {
    "generate": "stream text that continues a prompt",
    "chat": "talk to a model",
    "devices": "list the backends and devices of this machine",
    "explain": "show where each node of a model's graph runs, and why",
    "inspect": "show the metadata and tensors of a GGUF file",
    "tokenize": "turn text into token ids",
    "ops": "list which op runs on which device, with which types",
    "check": "test every kernel of every device against the reference",
    "show": "show what a kernel becomes: LLVM, assembly, OpenCL C, PTX",
    "bench": "measure tokens per second of models, and single ops",
    "cache": "show, clear or fill the cache of compiled kernels",
}
SYSTEMS = ("linux",)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lanewise: {' '.join(message.split())}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status."""
    from engine.errors import LanewiseError

    _tolerant(sys.stdout)
    _tolerant(sys.stderr)
    try:
        status = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except LanewiseError as error:
        return _failed(" ".join(str(error).split()), getattr(error, "status", 1))
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except MemoryError:
        return _failed("there is not enough memory; use a shorter context (-c), a smaller batch (-ub) or a smaller model")
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str]) -> int:
    if refused := _refusal():
        return _failed(refused)
    parser = _parser(argv)
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    if not args.command:
        parser.print_help(sys.stderr)
        return 2
    with _logging(args.verbose + getattr(args, "verbose_too", 0)):
        status: int = _module(args.command).run(args)
    return status


def _parser(argv: Sequence[str]) -> Parser:
    """All commands by name; options only for the one that is asked for."""
    parser = Parser("lanewise", description="Run GGUF models on kernels that are compiled on this machine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lanewise {__version__}")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more on stderr; -vv for everything")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    wanted = next((word for word in argv if word in COMMANDS), None)
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        if name == wanted:
            sub.add_argument(
                "-v", "--verbose", action="count", default=0, dest="verbose_too", help="log more on stderr; -vv for everything"
            )
            _module(name).add_options(sub)
    return parser


def _module(name: str) -> Any:
    """The module of a command: it has `add_options` and `run`."""
    return importlib.import_module(f"engine.cli.{name}")


def _refusal() -> str:
    """Why this machine is not supported, or nothing."""
    if not sys.platform.startswith(SYSTEMS):
        return f"{sys.platform} is not supported: Linux on x86-64 and aarch64 is"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"{os.uname().machine} is not supported: Linux on x86-64 and aarch64 is"
    return ""


@contextlib.contextmanager
def _logging(level: int) -> Iterator[None]:
    """Warnings on stderr always; with -v what is loaded and compiled; with -vv every decision."""
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("lanewise: %(message)s"))
    log = logging.getLogger("engine")
    before = log.level
    log.addHandler(handler)
    log.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(level, 2)])
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _failed(message: str, status: int = 1) -> int:
    sys.stderr.write(f"lanewise: {message}\n")
    return status


def _reader_gone() -> int:
    """Whoever read our output has left: nothing more can be said, and Python must not try at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return 1


def _tolerant(stream: TextIO) -> None:
    """Characters that the terminal's encoding does not have are shown as escapes, instead of ending the program."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
