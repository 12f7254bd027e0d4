"""Text in the lane language, held as text."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import ChainMap
from collections.abc import Mapping
from types import FunctionType
from typing import Any


class Function:
    """Text in the lane language: its source is read when it is defined, so that a later edit of the file cannot change it.

    Its free names are those of its module and, for a kernel made inside a Python function, of that function: so one text serves many ops,
    each with a function of its own.

    Attributes:
        label: the name, with the functions it was made with: "unary[relu_of]".
    """

    def __init__(self, fn: FunctionType) -> None:
        self.fn, self.name, self.file = fn, fn.__name__, fn.__code__.co_filename
        lines, self.line = inspect.getsourcelines(fn)
        self.source = textwrap.dedent("".join(lines))
        self.indent = len(lines[0]) - len(lines[0].lstrip())  # of the text in its file
        self.names = tuple(sorted(set(re.findall(r"[A-Za-z_]\w*", self.source))))
        self.parameters = tuple(inspect.signature(fn).parameters)
        own = _closure(fn)
        self.globals: Mapping[str, Any] = ChainMap(own, fn.__globals__) if own else fn.__globals__
        made_with = ", ".join(f.name for f in own.values() if isinstance(f, Function))
        self.label = f"{self.name}[{made_with}]" if made_with else self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _closure(fn: FunctionType) -> dict[str, Any]:
    """Names of the enclosing Python function that `fn` uses, with their values; what has none yet, `fn` itself, is left out."""
    out = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            out[name] = cell.cell_contents
        except ValueError:
            continue
    return out
