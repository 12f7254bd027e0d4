"""What is to be known of ops beyond their contract lines, one module per family; ops that are not here have the defaults of `Facts`.

To add a family: a module beside these with a dict `FACTS`, and its name below.
"""

from __future__ import annotations

from engine.testing.facts import copies, elementwise, fused, products, rows, structured
from engine.testing.facts.base import Bound, Facts

__all__ = ["FACTS", "Bound", "Facts"]

_FAMILIES = (elementwise, fused, rows, structured, products, copies)
FACTS: dict[str, Facts] = {name: facts for family in _FAMILIES for name, facts in family.FACTS.items()}
