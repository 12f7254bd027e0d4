"""The disk cache of compiled kernels: one file an entry, a checksum in front, written whole or not at all.

It works with several processes at once, survives truncation, deletion and a folder that cannot be written, and drops the entries used
longest ago when it grows over its limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
MAGIC = b"LWK1"
UNFINISHED = ".new-"
_HEAD = len(MAGIC) + 32


@dataclass
class ObjectCache:
    """Object code by key under `folder`, up to `limit` bytes; a `folder` of None keeps nothing."""

    folder: Path | None
    limit: int = 1 << 30
    _told: bool = False

    def path(self, key: str) -> Path | None:
        return self.folder / f"{key}.o" if self.folder else None

    def get(self, key: str) -> bytes | None:
        """The code, or None where there is none or it is damaged (then it is removed)."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        code = data[_HEAD:]
        if not data.startswith(MAGIC) or hashlib.sha256(code).digest() != data[len(MAGIC) : _HEAD]:
            log.warning("the kernel cache entry %s is damaged; it is made again", path)
            self.remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return code

    def put(self, key: str, code: bytes) -> None:
        """Keep the code; a folder that cannot be written is told once and otherwise ignored."""
        path = self.path(key)
        if path is None:
            return
        new: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as f:
                new = Path(f.name)
                f.write(MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(new, path)
        except OSError as why:
            if new is not None:
                with contextlib.suppress(OSError):
                    new.unlink()
            if not self._told:
                log.warning("compiled kernels cannot be kept in %s (%s); they are compiled again in the next process", self.folder, why)
                self._told = True
            return
        self.trim()

    def remove(self, key: str) -> None:
        path = self.path(key)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def entries(self) -> Iterator[tuple[Path, int, float]]:
        """Path, bytes and time of last use of each entry."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in self.folder.glob("*.o"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield path, stat.st_size, stat.st_mtime

    def trim(self) -> None:
        """Drop the entries used longest ago until the rest fits, and what processes that were killed left behind."""
        if self.folder is not None:
            for path in self.folder.glob(f"{UNFINISHED}*"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > 3600:
                        path.unlink()
        entries = sorted(self.entries(), key=lambda e: e[2])
        total = sum(size for _, size, _ in entries)
        for path, size, _ in entries:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def clear(self) -> int:
        """Remove every entry; gives the number removed."""
        removed = 0
        for path, _, _ in list(self.entries()):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed
