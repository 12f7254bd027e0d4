"""Everything a backend is tested with, as checks by name: rows of its table, its claims, whole graphs; and all of it for pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.backend import Backend
from engine.op import Op
from engine.testing.claims import check_claims
from engine.testing.conformance import Case, Outcome, cases, check_case
from engine.testing.graphs import NODE_OPS, check_graphs
from engine.testing.limits import Disagreement

LEAST = 3  # calls of each row of a table, however many rows an op has


@dataclass(frozen=True)
class Check:
    """One thing to test: `run` says what became of it. `op` is empty for whole graphs."""

    name: str
    op: str
    run: Callable[[], Outcome]
    case: Case | None = None

    def __str__(self) -> str:
        return self.name


def checks(backend: Backend, ops: Iterable[Op], floor: Backend | None = None, *, peers: Sequence[Backend] = (), examples: int = 20,
           seed: int = 0, budget: int = 0) -> list[Check]:
    """All checks of a backend.

    Args:
        floor: runs what the backend refuses in whole graphs, and alone says what they must give; None leaves graphs out.
        peers: backends whose results are compared with this one's.
        examples: calls of each op, over the rows of its table; at least 3 of each row.
        seed: repeats a run exactly.
        budget: about the most places a call may have; 0 for what suits the device.
    """
    made: list[Check] = []
    ops = list(ops)
    for op in ops:
        rows = cases(backend.table, [op])
        n = max(LEAST, -(-examples // max(len(rows), 1)))
        made += [Check(f"{case}", op.name, partial(check_case, backend, case, n, seed, budget, (), peers), case) for case in rows]
        if rows:
            made.append(Check(f"{op.name}-claims", op.name, partial(_claims, backend, op, examples, seed, budget)))
    by_name = {op.name: op for op in ops}
    if floor is not None and set(by_name) >= NODE_OPS:
        made.append(Check("graphs", "", partial(_graphs, backend, floor, by_name, examples, seed)))
    return made


def _claims(backend: Backend, op: Op, examples: int, seed: int, budget: int) -> Outcome:
    return _outcome(f"{op.name}-claims", lambda: sum(check_claims(backend, op, examples, seed, budget)))


def _graphs(backend: Backend, floor: Backend, ops: Mapping[str, Op], examples: int, seed: int) -> Outcome:
    return _outcome("graphs", lambda: check_graphs(backend, floor, ops, examples, seed))


def _outcome(name: str, check: Callable[[], int]) -> Outcome:
    try:
        n = check()
    except Disagreement as why:
        broken = why.__cause__ is not None and not isinstance(why.__cause__, Disagreement)
        return Outcome(name, "broken" if broken else "mismatch", reason=f"{why}")
    except Exception as why:  # a suite reports whatever a backend does
        return Outcome(name, "broken", reason=f"{type(why).__name__}: {why}")
    return Outcome(name, "ok" if n else "refused", n, "" if n else "nothing could be run")


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Plain values of an outcome."""
    case = outcome.case
    row = {"op": case.op.name, "types": list(case.key[1]), "variant": case.variant} if isinstance(case, Case) else {}
    return {"name": f"{case}", **row, "status": outcome.status, "n_calls": outcome.n_calls, "reason": outcome.reason}


def conformance_tests(backend: Backend | type[Backend] | str, ops: Mapping[str, Op] | None = None, *, examples: int = 20,
                      seed: int = 0) -> Callable[..., None]:
    """The whole suite as one parametrised test, for the author of a backend:

        from engine.testing import conformance_tests
        from my_package import MyBackend
        test_my_backend = conformance_tests(MyBackend)

    Args:
        backend: a backend, its class (the first device it discovers is tested), or the name it is registered by.
        ops: the ops it is given, by name; those of `kernels` by default.
        examples: calls of each op.
        seed: repeats a run exactly.

    Raises:
        DeviceError: there is no such device.
    """
    import pytest

    from engine.runtime import ops as known
    from engine.runtime import registry

    ops = known() if ops is None else ops
    found = registry()
    if isinstance(backend, str):
        backend = found.get(backend)
    elif isinstance(backend, type):
        backend = backend.discover(list(ops.values()))[0]
    floor = found.floor

    @pytest.mark.parametrize("check", checks(backend, ops.values(), floor, peers=() if backend is floor else (floor,),
                                             examples=examples, seed=seed), ids=str)
    def test_conformance(check: Check) -> None:
        outcome = check.run()
        if outcome.status != "ok":
            pytest.fail(f"{outcome.status}: {outcome.reason}\nseed {seed}", pytrace=False)

    return test_conformance
