"""Options that several commands share, under llama.cpp's names."""

from __future__ import annotations

import argparse
import re
from typing import Any

KV_TYPES = ("f16", "f32")
# Options for machines with a GPU: their place in `args` -> the flag that a message names.
GPU_FLAGS = {
    "gpu_layers": "-ngl",
    "split_mode": "-sm",
    "tensor_split": "-ts",
    "main_gpu": "-mg",
    "no_kv_offload": "-nkvo",
    "no_op_offload": "--no-op-offload",
    "override_tensor": "-ot",
}
# Sampling options: field of SamplerSettings -> (flags, type, help).
SAMPLING: dict[str, tuple[tuple[str, ...], type, str]] = {
    "seed": (("-s", "--seed"), int, "seed of the random numbers; -1 for another one each time (default: -1)"),
    "temperature": (("--temp", "--temperature"), float, "temperature; 0 or less always takes the likeliest token (default: 0.8)"),
    "top_k": (("--top-k",), int, "choose among the K likeliest tokens; 0 for all (default: 40)"),
    "top_p": (("--top-p",), float, "choose among the likeliest tokens that make up a share of P (default: 0.95)"),
    "min_p": (("--min-p",), float, "leave out tokens less likely than P times the likeliest (default: 0.05)"),
    "repeat_penalty": (("--repeat-penalty",), float, "make tokens that occurred less likely; 1 is off (default: 1.0)"),
    "repeat_last_n": (("--repeat-last-n",), int, "look back N tokens for penalties; 0 is off, -1 looks at all (default: 64)"),
    "presence_penalty": (("--presence-penalty",), float, "subtract this from tokens that occurred (default: 0)"),
    "frequency_penalty": (("--frequency-penalty",), float, "subtract this from a token each time it occurred (default: 0)"),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which file."""
    parser.add_argument("-m", "--model", metavar="FILE", help="the GGUF file (default: the demo model, if it is installed)")


def add_running(parser: argparse.ArgumentParser) -> None:
    """Where and how a model runs."""
    run = parser.add_argument_group("running")
    run.add_argument("-c", "--ctx-size", type=int, default=0, metavar="N", help="tokens the context holds; 0 for the model's (default: 0)")
    run.add_argument("-b", "--batch-size", type=int, default=2048, metavar="N", help="most tokens given at once (default: 2048)")
    run.add_argument("-ub", "--ubatch-size", type=int, default=512, metavar="N", help="most tokens computed at once (default: 512)")
    run.add_argument(
        "-t", "--threads", type=int, default=0, metavar="N", help="threads of the CPU, 1 to 1024; 0 for all allowed cores (default: 0)"
    )
    run.add_argument(
        "-dev", "--device", metavar="NAMES", help="devices, best first, with commas; 'none' for the CPU alone (see `lanewise devices`)"
    )
    run.add_argument(
        "-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="one attention kernel, or composed (default: auto)"
    )
    run.add_argument("-ctk", "--cache-type-k", choices=KV_TYPES, default="f16", help="type of K in the cache (default: f16)")
    run.add_argument("-ctv", "--cache-type-v", choices=KV_TYPES, default="f16", help="type of V in the cache (default: f16)")
    run.add_argument("--strict", action="store_true", help="fail instead of running a node on a device that was not asked for")
    _add_gpu(parser.add_argument_group("for machines with a GPU"))


def _add_gpu(group: Any) -> None:
    group.add_argument("-ngl", "--gpu-layers", "--n-gpu-layers", type=_layers, metavar="N", help="layers on the GPU: a number, auto or all")
    group.add_argument("-sm", "--split-mode", choices=("none", "layer", "row", "tensor"), help="how a model is split over GPUs")
    group.add_argument("-ts", "--tensor-split", type=_shares, metavar="A,B", help="shares of the GPUs")
    group.add_argument("-mg", "--main-gpu", type=int, metavar="N", help="the GPU for -sm none")
    group.add_argument("-nkvo", "--no-kv-offload", action="store_true", help="keep the KV cache in the host's memory")
    group.add_argument("--no-op-offload", action="store_true", help="run ops where their weights are, whatever the batch size")
    group.add_argument("-ot", "--override-tensor", metavar="PATTERN=TYPE", action="append", help="memory for the tensors that match")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen. What is not given is left to the engine."""
    group = parser.add_argument_group("sampling")
    for name, (flags, kind, about) in SAMPLING.items():
        group.add_argument(*flags, dest=name, type=kind, metavar="N" if kind is int else "X", help=about)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """How a conversation is written down."""
    parser.add_argument("-sys", "--system", "--system-prompt", metavar="TEXT", help="the system message of a chat")
    parser.add_argument(
        "--chat-template", metavar="TEMPLATE", help="a Jinja template, or chatml, gemma, llama2 or llama3, instead of the file's"
    )
    parser.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        "--max-tokens",
        type=_predict,
        default=-1,
        metavar="N",
        help="most tokens to generate; -1 for as many as fit (default: -1)",
    )
    parser.add_argument(
        "-r", "--stop", "--reverse-prompt", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def add_text(parser: argparse.ArgumentParser) -> None:
    """Where a text comes from."""
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the text; '-' reads standard input")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text, as an option")
    parser.add_argument("-f", "--file", metavar="FILE", help="a file that holds the text; '-' reads standard input")
    parser.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=False,
        help=r"read \n, \t, \r, \', \" and \\ in the text as escapes (default: off)",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def _predict(text: str) -> int:
    n = int(text)
    if n < -2:
        raise argparse.ArgumentTypeError(f"{n} tokens: 0 or more are possible, -1 for as many as fit")
    return max(n, -1)  # llama.cpp's -2, "until the context is full", is what -1 comes to here


def _layers(text: str) -> str:
    if not re.fullmatch(r"-?\d+|auto|all", text):
        raise argparse.ArgumentTypeError(f"{text!r}: a number, auto or all is expected")
    return text


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in re.split("[,/]", text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas are expected") from None
