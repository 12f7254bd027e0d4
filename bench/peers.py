"""Engines side by side: each in a process of its own that works only when it is asked, and a watch for other work on the machine.

An engine answers one line of JSON with one line of JSON. Only the standard library is used here: a peer may have a Python of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BUSY = 0.2  # of a core, by a process that is not ours
Answer = Callable[[dict[str, Any]], Any]


class Engine:
    """A process that measures when it is told to, and is stopped in between, so that waiting threads take no time from other engines.

    `facts` is what it said of itself when it was ready.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts: dict[str, Any] = self._line()

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer. Raises RuntimeError if the engine ends instead."""
        assert self.process.stdin
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._line()
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def _line(self) -> Any:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            assert self.process.stdin and self.process.stdout
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            self.process.stdout.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(facts: Mapping[str, Any], answer: Answer) -> None:
    """The other end: say that we are ready, then answer until the asker goes. What libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        print(json.dumps(facts), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=out, flush=True)


class Watch:
    """Looks which processes, ours left out, use more than a fifth of a core between two looks."""

    def __init__(self, ours: Sequence[int] = ()) -> None:
        self._ours = {os.getpid(), *ours}
        self._before, self._at = _ticks(), time.monotonic()

    def look(self) -> list[str]:
        """ "name (pid): 95 %" for each, since the last look."""
        now, at = _ticks(), time.monotonic()
        span = max(at - self._at, 0.05) * os.sysconf("SC_CLK_TCK")
        shares = {pid: (used - self._before.get(pid, (used, ""))[0]) / span for pid, (used, _) in now.items() if pid not in self._ours}
        found = [f"{now[pid][1]} ({pid}): {100 * share:.0f} %" for pid, share in shares.items() if share > BUSY]
        self._before, self._at = now, at
        return found


def _ticks() -> dict[int, tuple[int, str]]:
    """Clock ticks of each process, and its name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        parts = rest.split()
        found[int(path.parent.name)] = int(parts[11]) + int(parts[12]), head.partition("(")[2]
    return found


def warn_if_busy(watch: Watch, told: list[str]) -> None:
    """Warn once of each busy process, and keep what was told: figures from a busy machine are none."""
    for other in watch.look():
        if other.rpartition(":")[0] not in {t.rpartition(":")[0] for t in told}:
            print(f"warning: another process is busy, the figures are not to be trusted: {other}", file=sys.stderr)
            told.append(other)


def write_results(kind: str, found: Mapping[str, Any], machine: Mapping[str, Any], path: Path | None) -> Path:
    """Write a comparison as JSON, by default under bench/results, named after commit and CPU."""
    cpu = re.sub(r"\W+", "-", str(machine["cpu_info"])).strip("-").lower()
    commit = str(machine["build_commit"]).replace("+", "-changed")
    path = path or RESULTS / f"{kind}-{commit}-{cpu}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
