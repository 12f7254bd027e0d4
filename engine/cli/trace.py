"""Where the time of a run goes, as a file that chrome://tracing and Perfetto open: one event per launch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from engine.sched.execute import Stage


class Trace:
    """Collects the launches of every run. Give it to a context as `trace`."""

    def __init__(self) -> None:
        self._runs: list[tuple[Stage, int, list[int]]] = []

    def __call__(self, stage: Stage) -> None:
        """Run a split and keep when each of its launches ended, or when all of it did where the backend tells no more."""
        plan: Any = stage.plan
        started = time.monotonic_ns()
        if hasattr(plan, "ends_ns"):
            plan.run(trace=True)
            ends = plan.ends_ns
        else:
            plan.run()
            stage.backend.synchronize()
            ends = [time.monotonic_ns()]
        self._runs.append((stage, started, ends))

    def write(self, path: str) -> None:
        """Write every event so far as Chrome's trace format."""
        events = [event for run in self._runs for event in _events(*run)]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _events(stage: Stage, started: int, ends: list[int]) -> list[dict[str, Any]]:
    plan: Any = stage.plan
    launches = getattr(plan, "launches", None)
    if launches is None:
        return [_event(f"{len(stage.steps)} steps", stage.backend.name, started, ends[-1], {"steps": [s.out.name for s in stage.steps]})]
    begins = [started, *ends[:-1]]
    return [
        _event(
            one.step.out.name,
            stage.backend.name,
            begin,
            end,
            {
                "op": one.step.op.name,
                "variant": one.variant,
                "shape": list(one.step.out.shape),
                "groups": one.binding.n_groups,
                "nodes": [node.name for node in one.step.replaces],
            },
        )
        for one, begin, end in zip(launches, begins, ends, strict=True)
    ]


def _event(name: str, backend: str, begin: int, end: int, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "cat": about.get("op", "split"),
        "ph": "X",
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "pid": 0,
        "tid": backend,
        "args": about,
    }
