"""The functions of `prelude.cl`, as far as a text needs them."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def pieces() -> dict[str, str]:
    """Every function of the prelude by name, in the file's order."""
    text = files(__package__).joinpath("prelude.cl").read_text()
    functions = [p.strip() for p in text.split("\n\n") if not p.startswith("//")]
    return {_name(f): f for f in functions}


def _name(function: str) -> str:
    match = re.search(r"(\w+)\(", function)
    assert match is not None
    return match[1]


def prelude(text: str, lanes: int, *, divide_exact: bool = False) -> str:
    """What stands in front of a text: the functions it calls, and those they call."""
    known = dict(pieces())
    exact = known.pop("inverse_root_exact")
    if divide_exact:
        known["inverse_root"] = exact.replace("inverse_root_exact", "inverse_root")
    wanted: set[str] = set()
    todo = [text]
    while todo:
        for name in re.findall(r"\b(\w+)\(", todo.pop()):
            if name in known and name not in wanted:
                wanted.add(name)
                todo.append(known[name].partition("{")[2])
    parts = [p for name, function in known.items() if name in wanted for p in (function, "")]
    return "\n".join(["#pragma OPENCL FP_CONTRACT OFF", f"#define LANES {lanes}", "", *parts])
