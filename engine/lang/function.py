"""Text in the lane language, held as text."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from types import FunctionType
from typing import Any


class Function:
    """Text in the lane language: its source is read when it is defined, so that a later edit of the file cannot change it."""

    def __init__(self, fn: FunctionType) -> None:
        self.fn, self.name, self.file = fn, fn.__name__, fn.__code__.co_filename
        lines, self.line = inspect.getsourcelines(fn)
        self.source = textwrap.dedent("".join(lines))
        self.indent = len(lines[0]) - len(lines[0].lstrip())  # of the text in its file
        self.names = tuple(sorted(set(re.findall(r"[A-Za-z_]\w*", self.source))))
        self.parameters = tuple(inspect.signature(fn).parameters)

    @property
    def globals(self) -> Mapping[str, Any]:
        return self.fn.__globals__

    def __repr__(self) -> str:
        return f"<{self.name}>"
