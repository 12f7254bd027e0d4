"""Ops that move elements."""

from __future__ import annotations

from engine.testing.facts.base import Draw, Facts, Sizes, bound_of_copies, cells, room, shorter


def _ids_of_matrices(draw: Draw, sizes: Sizes) -> None:
    shorter(("ia", "a"), ("ib", "b"))(draw, sizes)
    room("m", 1)(draw, sizes)


FACTS: dict[str, Facts] = {
    "cpy": Facts(bound=bound_of_copies, encoded="x"),
    "cpy_to": Facts(bound=bound_of_copies, encoded="x"),
    "set_rows": Facts(_ids_of_matrices, values={"ids": cells("m", 1)}, bound=bound_of_copies, encoded="x"),
    "set_keys": Facts(room("blocks", 32), extents={"blocks": (1, 2, 3)}, values={"ids": cells("blocks", 32)}, bound=bound_of_copies),
}
