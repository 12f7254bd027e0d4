"""A `llama-bench` given by its path, asked like an engine: one test a run, read from its JSON. It warms up by itself before it measures."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class LlamaBench:
    """`facts` is what the program says of itself in its first answer.

    Args:
        command: the program, and words of its own before the options.
    """

    def __init__(self, command: list[str], path: str, threads: int, flash: bool, n_batch: int, n_ubatch: int) -> None:
        self.name = "llama-bench"
        self.facts: dict[str, Any] = {}
        self._command = [*command, "-m", path, "-t", str(threads), "-fa", str(int(flash)), "-b", str(n_batch), "-ub", str(n_ubatch),
                         "-ngl", "0", "-r", "1", "-o", "json"]

    def ask(self, what: str, n: int, depth: int) -> float:
        """Seconds of a prompt of `n` tokens ("pp"), or of `n` tokens one by one ("tg"), behind `depth` tokens.

        Raises:
            RuntimeError: the program cannot be run, fails, or answers with something else.
        """
        test = ["-p", str(n if what == "pp" else 0), "-n", str(n if what == "tg" else 0), *(["-d", str(depth)] if depth else [])]
        row = self._row(self._run(test))
        asked = (n if what == "pp" else 0, n if what == "tg" else 0, depth)
        done = (row["n_prompt"], row["n_gen"], row.get("n_depth", 0))
        if done != asked:
            raise RuntimeError(f"{self.name} measured n_prompt, n_gen, n_depth = {done} instead of {asked}")
        self.facts = {"version": f"llama-bench {row.get('build_commit', '')} ({row.get('build_number', '')})",
                      "system_info": f"{row.get('cpu_info', '')}, {row.get('backends', '')}"}
        return float(row["avg_ns"]) / 1e9

    def _run(self, test: list[str]) -> str:
        try:
            done = subprocess.run([*self._command, *test], capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"{self._command[0]} cannot be run: {error.strerror}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it says nothing"]
            raise RuntimeError(f"{self.name} ended with status {done.returncode}: {said[-1]}")
        return done.stdout

    def _row(self, text: str) -> dict[str, Any]:
        """The one row of its answer, with the fields that are needed."""
        try:
            (row,) = json.loads(text)
            assert all(isinstance(row[key], (int, float)) for key in ("n_prompt", "n_gen", "avg_ns")) and row["avg_ns"] > 0
        except (ValueError, TypeError, KeyError, AssertionError):
            raise RuntimeError(f"{self.name} -o json gave no list of one row with n_prompt, n_gen and avg_ns: {text[:80]!r}") from None
        return dict(row)
