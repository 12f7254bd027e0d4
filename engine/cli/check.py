"""`lanewise check`: every kernel of every device against the reference and against each other, whole graphs, and what devices claim."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.backend import Backend, DeviceType
from engine.cli.text import UsageError
from engine.errors import LanewiseError
from engine.op import Op
from engine.registry import Registry
from engine.runtime import backend_class, ops, registry

if TYPE_CHECKING:
    from engine.testing import Case, Outcome
    from engine.testing.suite import Check

STATUSES = ("ok", "mismatch", "refused", "broken")
Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-b", "--backend", metavar="NAMES", help="devices, with commas (default: all this machine has, but those for tests)")
    add("-o", "--op", metavar="NAMES", help="only these ops, with commas")
    add("-p", "--pattern", metavar="REGEX", help="only checks whose name matches, such as 'mul_mat-q4_.*' or 'graphs'")
    add("--seed", type=int, metavar="N", help="repeats a run exactly (default: another one each time; it is printed)")
    add("--examples", type=int, default=20, metavar="N", help="calls of each op, at least 3 of each row of a table (default: 20)")
    add("--call", metavar="TEXT", help="run this very call, as a failure printed it")
    add("--variant", metavar="NAME", help="with --call: the variant that runs it")
    add("--compile-only", action="store_true", help="compile every key and variant, where a device can do that without being there")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    pattern, ops = _pattern(args.pattern), _ops(args.op)
    if args.examples < 1:
        raise UsageError(f"--examples {args.examples}: 1 or more are needed")
    if args.compile_only:
        return _compile_only(args, ops, pattern)
    _require_hypothesis()
    found = registry()
    try:
        backends = _selected(found, args.backend)
        if args.call:
            return _run_call(args, backends)
        seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
        results = {b.name: _check_device(b, i, backends, found, ops, pattern, args.examples, seed) for i, b in enumerate(backends)}
        return _report(results, seed, args.json)
    finally:
        found.close()


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as why:
        raise UsageError(f"-p {text!r} is no regular expression: {why}") from None


def _ops(names: str | None) -> list[Op]:
    asked = [n.strip() for n in (names or "").split(",") if n.strip()]
    if unknown := [n for n in asked if n not in ops()]:
        raise UsageError(f"there is no op {unknown[0]!r}: {', '.join(ops())} are known")
    return [ops()[n] for n in asked] if asked else list(ops().values())


def _require_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401  # the strategies are made of it
    except ImportError:
        raise LanewiseError("`lanewise check` needs the package hypothesis: pip install 'lanewise[test]'") from None


def _selected(found: Registry, names: str | None) -> list[Backend]:
    return found.select(names, strict=True) if names else [b for b in found.all if b.device.type is not DeviceType.TEST]


# -- one device -------------------------------------------------------------------------------------------------


def _check_device(backend: Backend, at: int, backends: Sequence[Backend], found: Registry, ops: Sequence[Op], pattern: re.Pattern[str],
                  examples: int, seed: int) -> list[Outcome]:
    """All checks of a device that were asked for. Its results are compared with those of the devices before it, and of the CPU."""
    from engine.testing import checks

    floor = found.floor
    peers = dict.fromkeys(b for b in (*backends[:at], floor) if b is not backend)
    todo = [c for c in checks(backend, ops, floor, peers=list(peers), examples=examples, seed=seed) if pattern.search(c.name)]
    progress = _Progress(backend.name, len(todo))
    return [progress.run(check) for check in todo]


class _Progress:
    """A counter on stderr: on a terminal a line that is written over, elsewhere one line each ten seconds. Failures are told at once."""

    def __init__(self, device: str, total: int) -> None:
        self._device, self._total, self._done = device, total, 0
        self._last = time.monotonic()
        self._bad = 0

    def run(self, check: Check) -> Outcome:
        self._tell(check.name)
        outcome = check.run()
        self._done += 1
        self._bad += outcome.status != "ok"
        if self._done == self._total:
            self._write("done", force=True)
        return outcome

    def _tell(self, name: str) -> None:
        self._write(name, force=sys.stderr.isatty())

    def _write(self, name: str, force: bool) -> None:
        if not force and time.monotonic() - self._last < 10:
            return
        self._last = time.monotonic()
        failed = f", {self._bad} failed" if self._bad else ""
        begin, end = ("\r\x1b[K", "" if name != "done" else "\n") if sys.stderr.isatty() else ("", "\n")
        sys.stderr.write(f"{begin}lanewise: {self._device}: {self._done} of {self._total} checks{failed}: {name}{end}")
        sys.stderr.flush()


# -- one call ---------------------------------------------------------------------------------------------------


def _run_call(args: argparse.Namespace, backends: Sequence[Backend]) -> int:
    """The one call that was written down, on every device asked for, or on the CPU."""
    from engine.testing import Example

    try:
        example = Example.parse(args.call, ops())
    except ValueError as why:
        raise UsageError(f"--call: {why}") from None
    results = {b.name: [_one_call(b, example, args.variant)] for b in backends}
    return _report(results, example.seed, args.json)


def _one_call(backend: Backend, example: Any, variant: str | None) -> Outcome:
    from engine.testing import Disagreement, Outcome, check_example, refusal

    case = _case_of(backend, example, variant)
    name = case or f"{example.op.name}-{'-'.join(example.key[1])}"
    memory = case.memory(backend) if case else None
    if why := refusal(backend, example, variant, memory):
        return Outcome(name, "refused", 0, why)
    try:
        check_example(backend, example, variant, memory)
    except Disagreement as why:
        return Outcome(name, "mismatch", 1, f"{why}")
    except Exception as why:  # whatever a device does is the result
        return Outcome(name, "broken", 1, f"{type(why).__name__}: {why}")
    return Outcome(name, "ok", 1)


def _case_of(backend: Backend, example: Any, variant: str | None) -> Case | None:
    from engine.testing import cases

    return next((c for c in cases(backend.table, [example.op]) if c.key == example.key and c.variant == variant), None)


# -- results ----------------------------------------------------------------------------------------------------


def _report(results: dict[str, list[Outcome]], seed: int, as_json: bool) -> int:
    """Print what was found; 0 only if something ran on each device, and everything that was asked for was right."""
    ok = {name: any(o.status == "ok" for o in outcomes) and all(o.status == "ok" for o in outcomes) for name, outcomes in results.items()}
    if as_json:
        from engine.testing.suite import outcome_to_json

        devices = [{"name": name, "ok": ok[name], "counts": _counts(outcomes), "checks": [outcome_to_json(o) for o in outcomes]}
                   for name, outcomes in results.items()]
        json.dump({"seed": seed, "ok": all(ok.values()), "devices": devices}, sys.stdout)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for name, outcomes in results.items() for line in _lines(name, outcomes)))
        sys.stdout.write(f"seed {seed}: {'ok' if results and all(ok.values()) else 'FAILED'}\n")
    return 0 if results and all(ok.values()) else 1


def _counts(outcomes: Iterable[Outcome]) -> Row:
    counts = Counter(o.status for o in outcomes)
    return {status: counts[status] for status in STATUSES}


def _lines(device: str, outcomes: Sequence[Outcome]) -> list[str]:
    """One line an op, then everything that is not right."""
    by_op: dict[str, list[Outcome]] = {}
    for o in outcomes:
        by_op.setdefault(_op_of(o), []).append(o)
    lines = [f"{device} {op}: {len(some)} checks, {sum(o.n_calls for o in some)} calls: {_told(some)}" for op, some in by_op.items()]
    lines += [f"{device} {o.case}: {o.status} after {o.n_calls} calls: {o.reason}" for o in outcomes if o.status != "ok"]
    return lines or [f"{device}: nothing was run: no check has such a name, or the device's table has no such op"]


def _op_of(outcome: Outcome) -> str:
    return outcome.case.removesuffix("-claims") if isinstance(outcome.case, str) else outcome.case.op.name


def _told(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"{n} {status}" for status, n in _counts(outcomes).items() if n)


# -- compiling without a device ---------------------------------------------------------------------------------


def _compile_only(args: argparse.Namespace, ops: Sequence[Op], pattern: re.Pattern[str]) -> int:
    """Compile every row for a device that need not be there, by the backend's own `compile_only`."""
    if not args.backend:
        raise UsageError("--compile-only: name the backend with -b, such as -b cuda")
    found = []
    for name in args.backend.split(","):
        cls = backend_class(name.strip())
        compile_only: Callable[..., Iterable[Row]] | None = getattr(cls, "compile_only", None)
        if compile_only is None:
            raise UsageError(f"--compile-only: the backend {name!r} compiles on its device only")
        found += [{"backend": name, **row} for row in _told_rows(compile_only(ops, lambda name: bool(pattern.search(name))), name)]
    bad = [row for row in found if row["status"] != "ok"]
    if args.json:
        json.dump({"ok": bool(found) and not bad, "kernels": found}, sys.stdout)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("".join(f"{_kernel_line(row)}\n" for row in found))
        sys.stdout.write(f"{len(found)} kernels, {len(bad)} failed\n")
    return 0 if found and not bad else 1


def _told_rows(rows: Iterable[Row], device: str) -> Iterable[Row]:
    last = time.monotonic()
    for i, row in enumerate(rows):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            sys.stderr.write(f"lanewise: {device}: {i} kernels compiled\n")
        yield row


def _kernel_line(row: Row) -> str:
    figures = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("backend", "name", "status", "reason") and v is not None)
    told = [f"{row['backend']} {row['name']}", row["status"], figures, row.get("reason") or ""]
    return ": ".join(part for part in told if part)
