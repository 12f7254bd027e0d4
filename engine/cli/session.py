"""A model and a context made from the command line's options, and the line on stderr that says what runs where."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.backend import Backend, DeviceType
from engine.cli.interrupt import Interrupts
from engine.cli.options import GPU_FLAGS
from engine.cli.progress import Progress
from engine.model import Context, Model
from engine.runtime import load
from engine.settings import settings


def note(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"lanewise: {text}\n")
    sys.stderr.flush()


@contextmanager
def session(args: argparse.Namespace) -> Iterator[Context]:
    """The model that `args` name, loaded and placed, with a context; both are closed at the end."""
    flash, template = args.flash_attn != "off", getattr(args, "chat_template", None)
    threads = args.threads or settings().threads
    with load(args.model, devices=args.device, threads=threads, flash=flash, chat_template=template, strict=args.strict) as model:
        if ignored := _ignored(args, model.backends):
            note(f"no usable GPU found, {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored")
        n_ubatch = min(args.ubatch_size, args.batch_size)
        yield model.context(args.ctx_size, kv_type_k=args.cache_type_k, kv_type_v=args.cache_type_v, threads=threads, n_ubatch=n_ubatch)


@dataclass
class Running:
    """Output while a model runs: the bar of a compilation is taken away first."""

    interrupts: Interrupts
    progress: Progress

    def say(self, text: str) -> None:
        """A line on stderr."""
        self.progress.stop()
        note(text)

    def emit(self, text: str) -> None:
        """A piece of the result, at once. Raises KeyboardInterrupt if Ctrl-C was pressed."""
        self.progress.stop()
        sys.stdout.write(text)
        sys.stdout.flush()
        self.interrupts.check()


@contextmanager
def running(context: Context) -> Iterator[Running]:
    """Inside, Ctrl-C stops the context's run and ends in KeyboardInterrupt, and compiling is shown."""
    with Interrupts(context) as interrupts, Progress(context.model.backends, interrupts.check) as progress:
        yield Running(interrupts, progress)


def placed(context: Context) -> str:
    """One line: the model, how many nodes of a token run where, and on how many threads and lanes of the CPU."""
    model: Model = context.model
    floor = model.backends[-1]
    n_threads, features = getattr(floor, "n_threads", 0), getattr(floor, "features", None)
    lanes = f", {features.lanes} lanes" if features else ""
    return (
        f"{model.description}; {context.explain().summary}; {n_threads} thread{'s' * (n_threads != 1)}{lanes}; context of {context.n_ctx}"
    )


def _ignored(args: argparse.Namespace, backends: tuple[Backend, ...]) -> list[str]:
    """Flags that were given, are for GPUs, and have no GPU to work on."""
    if any(b.device.type in (DeviceType.GPU, DeviceType.IGPU) for b in backends):
        return []
    return [flag for name, flag in GPU_FLAGS.items() if (value := getattr(args, name)) is not None and value is not False and value != "0"]
