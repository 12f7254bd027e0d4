"""Every exception Lanewise raises, under one base. Each message is one line: what was found, what was expected, what to do next."""

from __future__ import annotations

from collections.abc import Mapping


class LanewiseError(Exception):
    """The base of all errors that are not a bug of ours."""


class GgufError(LanewiseError):
    """A file that is missing, is not GGUF, is damaged, or holds something unknown."""


class ModelError(LanewiseError):
    """A well-formed file that cannot be run: unknown architecture, missing tensor, wrong shape, unknown hyperparameter."""


class TokenizerError(LanewiseError):
    """An unknown tokenizer, or token ids and text it cannot map."""


class ChatTemplateError(LanewiseError):
    """A chat template that is missing, does not compile, or asks for too much."""


class SamplingError(LanewiseError):
    """A sampler setting out of range, or logits nothing can be drawn from."""


class SettingError(LanewiseError):
    """A LANEWISE_* variable or an option whose value cannot be used."""


class ContextError(LanewiseError):
    """Tokens that do not fit: an empty batch, an id outside the vocabulary, more than the context holds."""


class ClosedError(LanewiseError):
    """A model, context or team used after `close()`."""


class InterruptedRun(LanewiseError):
    """A run that was asked to stop between two nodes; its outputs are not to be used."""


class KernelError(LanewiseError):
    """A kernel's text that the language refuses: with file, line, column and a caret."""

    def __init__(self, message: str, file: str = "", line: int = 0, column: int = 0, source: str = "") -> None:
        self.message, self.file, self.line, self.column, self.source = message, file, line, column, source
        where = f"{file}:{line}:{column + 1}: " if file else ""
        caret = f"\n    {source}\n    {' ' * column}^" if source else ""
        super().__init__(f"{where}{message}{caret}")


class BuildError(LanewiseError):
    """A device's compiler that refuses a text we printed: a bug of ours or of the driver. It carries the compiler's log and the source.

    Attributes:
        log: what the compiler said.
        source: the text, without line numbers.
    """

    def __init__(self, message: str, log: str, source: str) -> None:
        self.log, self.source = log.strip(), source
        lines = source.splitlines()
        width = len(str(len(lines)))
        listing = "\n".join(f"{k:{width}}  {line}".rstrip() for k, line in enumerate(lines, 1))
        super().__init__(f"{message}\n{self.log}\n{listing}")


class ShapeError(LanewiseError):
    """Operands whose shapes or types do not meet an op's contract."""


class AllocationError(LanewiseError):
    """Memory a device cannot give: size, alignment or limit."""


class DeviceError(LanewiseError):
    """An unknown or unavailable device."""


class Unplaceable(LanewiseError):
    """A node no backend takes.

    `tensor`, `op` and `types` say which; `reasons` maps each backend's name to why it refused.
    """

    def __init__(self, tensor: str, op: str, types: tuple[str, ...], reasons: Mapping[str, str]) -> None:
        self.tensor, self.op, self.types, self.reasons = tensor, op, types, dict(reasons)
        said = "; ".join(f"{name}: {why}" for name, why in self.reasons.items()) or "there is no backend"
        super().__init__(f"no backend runs {op}({', '.join(types)}) for tensor '{tensor}' ({said})")


class UnsupportedOp(Unplaceable):
    """One device was asked to run a node that its kernel table does not hold."""
