"""Merge rules for byte-pair encoding: read from the file, or derived from scores (SentencePiece)."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

CACHE_VERSION = b"lanewise spm merges 1\n"
DIGEST_SIZE = hashlib.sha256().digest_size

Merge = tuple[str, str]


def split_merges(lines: Iterable[str]) -> list[Merge]:
    """Pairs of a file's merges. The separator is the first space that is not the first character."""
    pairs = (line.split(" ") for line in lines)
    return [(p[0], p[1]) if len(p) == 2 and p[0] else _split_odd(p) for p in pairs]


def _split_odd(parts: list[str]) -> Merge:
    line = " ".join(parts)
    left, _, right = line[1:].partition(" ")
    return line[:1] + left, right


def usable(merges: Iterable[Merge], vocabulary: dict[str, int]) -> list[Merge]:
    """The merges whose two parts and result are tokens; others can produce nothing."""
    return [m for m in merges if m[0] in vocabulary and m[1] in vocabulary and m[0] + m[1] in vocabulary]


def merges_from_scores(
    tokens: Sequence[str], ids: NDArray[np.int64], scores: NDArray[np.float32], cache_dir: Path | None
) -> list[Merge]:
    """Every way to join two of the tokens `ids` into a third of them, best score of the result first.

    SentencePiece joins the neighbours whose union is the token of the best score; as merge rules, that
    is each split of each token, ranked by the token's score. The derived table is kept in `cache_dir`.
    """
    if cache_dir is None:
        return derive_merges(tokens, ids, scores)
    path = cache_dir / f"spm-merges-{_key(tokens, ids, scores)}.bin"
    pairs = _load(path, len(tokens))
    if pairs is not None:
        left, right = pairs.tolist()
        return list(zip(map(tokens.__getitem__, left), map(tokens.__getitem__, right), strict=True))
    merges = derive_merges(tokens, ids, scores)
    _store(path, merges, tokens, ids)
    return merges


def derive_merges(tokens: Sequence[str], ids: NDArray[np.int64], scores: NDArray[np.float32]) -> list[Merge]:
    """The table of `merges_from_scores`, worked out. One comprehension: it runs over a million splits."""
    best_first = ids[np.argsort(-scores[ids], kind="stable")]
    words = [tokens[i] for i in best_first.tolist()]
    known = frozenset(words)
    return [
        (left, right)
        for word in words
        for at in range(1, len(word))
        if (left := word[:at]) in known and (right := word[at:]) in known
    ]


def _key(tokens: Sequence[str], ids: NDArray[np.int64], scores: NDArray[np.float32]) -> str:
    digest = hashlib.sha256(CACHE_VERSION)
    digest.update("\0".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(ids.astype("<i8").tobytes())
    digest.update(scores.astype("<f4").tobytes())
    return digest.hexdigest()[:32]


def _load(path: Path, n_tokens: int) -> NDArray[np.int32] | None:
    """The stored pairs, as two rows of ids; None if there is no such file or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        log.debug("no tokenizer table in the cache: %s", error)
        return None
    digest, body = data[:DIGEST_SIZE], data[DIGEST_SIZE:]
    if len(body) % 8 or hashlib.sha256(body).digest() != digest:
        log.debug("tokenizer table %s is damaged: made again", path)
        return None
    pairs = np.frombuffer(body, dtype="<i4").reshape(2, -1)
    if pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < n_tokens:
        log.debug("tokenizer table %s is for another vocabulary: made again", path)
        return None
    return pairs


def _store(path: Path, merges: Sequence[Merge], tokens: Sequence[str], ids: NDArray[np.int64]) -> None:
    """Write the pairs under a temporary name, then rename: readers see all of it or nothing."""
    position = {tokens[i]: i for i in ids.tolist()}
    pairs = np.array([[position[m[side]] for m in merges] for side in (0, 1)], dtype="<i4")
    body = pairs.tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary(path) as written:
            written.write_bytes(hashlib.sha256(body).digest() + body)
            os.replace(written, path)
    except OSError as error:
        log.debug("tokenizer table %s not stored: %s", path, error)


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A fresh file beside `path`, removed afterwards if it is still there."""
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
