"""`lanewise generate`: stream text that continues a prompt."""

from __future__ import annotations

import argparse
import json
import sys

from engine.cli.options import add_chat, add_model, add_running, add_sampling, add_text, sampling_of
from engine.cli.session import Running, note, placed, running, session
from engine.cli.text import UsageError, read_text, unescaped
from engine.cli.trace import Trace
from engine.errors import InterruptedRun
from engine.generate import Generation
from engine.model import Context
from engine.sample import SamplerSettings


def add_options(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    add_model(parser)
    parser.add_argument(
        "-cnv", "--chat", "--conversation", action="store_true", help="write the prompt as a chat message, with the model's template"
    )
    add_chat(parser)
    parser.add_argument(
        "--display-prompt", action=argparse.BooleanOptionalAction, default=False, help="print the prompt too (default: off)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of streaming text")
    parser.add_argument("--explain", action="store_true", help="say on stderr where each node runs, and why")
    parser.add_argument("--trace", metavar="FILE", help="write the time of each kernel launch as a Chrome trace")
    add_sampling(parser)
    add_running(parser)


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        raise UsageError("-sys needs --chat: without it the prompt is taken as it is")
    settings, text = SamplerSettings(**sampling_of(args)), read_text(args)
    if not text:
        raise UsageError("the prompt is empty: give some text")
    with session(args) as context:
        prompt = _templated(context, text, args.system) if args.chat else text
        generation = _generation(context, prompt, settings, args)
        trace = context.trace = Trace() if args.trace else None
        with running(context) as now:
            now.say(placed(context))
            if args.explain:
                sys.stderr.write(f"{context.explain()}\n")
            generation.timings.compile_s += context.build_s
            status = _stream(generation, now, args)
        _report(generation, prompt, args)
        if trace is not None:
            trace.write(args.trace)
    return status


def _templated(context: Context, text: str, system: str | None) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return context.model.chat([*messages, {"role": "user", "content": text}])


def _generation(context: Context, prompt: str, settings: SamplerSettings, args: argparse.Namespace) -> Generation:
    stops = [unescaped(s) if args.escape else s for s in args.stop]
    return Generation(context, prompt, max_tokens=args.predict, stop=stops, settings=settings, ignore_end=args.ignore_eos)


def _stream(generation: Generation, now: Running, args: argparse.Namespace) -> int:
    """Print pieces as they come; 130 if Ctrl-C ended it."""
    if args.display_prompt and not args.json:
        sys.stdout.write(generation.model.detokenize(generation.prompt_tokens))
    try:
        for piece in generation:
            now.emit("" if args.json else piece)
    except (KeyboardInterrupt, InterruptedRun):
        generation.finish_reason = "interrupted"
        return 130
    return 0


def _report(generation: Generation, prompt: str, args: argparse.Namespace) -> None:
    """The end of the output, and on stderr why it ended and how long it took."""
    if args.json:
        json.dump(document(generation, prompt), sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
    if generation.finish_reason == "context":
        n_ctx = generation.context.n_ctx
        note(f"the context of {n_ctx} tokens is full, so the text ends here: use a larger one (-c), or ask for less (-n)")
    t = generation.timings
    note(
        f"prompt of {len(generation.prompt_tokens)} tokens in {t.prompt_s:.2f} s ({t.prompt_tps:.1f} a second), "
        f"{len(generation.tokens)} tokens, after the first in {t.decode_s:.2f} s ({t.decode_tps:.1f} a second); "
        f"loaded in {t.load_s:.2f} s, built and compiled in {t.compile_s:.2f} s; seed {generation.sampler.seed}; "
        f"end: {generation.finish_reason}"
    )


def document(generation: Generation, prompt: str) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "model": str(generation.model.path),
        "prompt": prompt,
        "prompt_tokens": generation.prompt_tokens,
        "tokens": generation.tokens,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "timings": generation.timings.as_dict(),
        "placement": generation.placement,
    }
