"""Streaming: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import StopStrings, TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is a control token."""

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        if token == 256:
            return b"<end>" if special else b""
        return bytes([token])


def stream(data: bytes) -> list[str]:
    out = TextStream(Bytes())  # type: ignore[arg-type]
    return [*(out.feed(b) for b in data), out.flush()]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_pieces_are_whole_characters(text):
    pieces = stream(text.encode())
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all(piece in ("", character) for piece, character in zip(pieces, spread(text), strict=False))


def spread(text: str) -> list[str]:
    """Each character at the place of its last byte."""
    return [c if last else "" for c in text for last in [False] * (len(c.encode()) - 1) + [True]]


@given(st.binary())
def test_any_bytes_give_the_text_of_the_whole(data):
    assert "".join(stream(data)) == data.decode("utf-8", "replace")


def test_unfinished_character_is_replaced_at_the_end():
    out = TextStream(Bytes())  # type: ignore[arg-type]
    assert [out.feed(b) for b in "é🦙".encode()[:-1]] == ["", "é", "", "", ""]
    assert out.flush() == "\ufffd"
    assert out.flush() == ""
    assert out.feed(ord("a")) == "a"


def test_control_tokens():
    assert TextStream(Bytes()).feed(256) == ""  # type: ignore[arg-type]
    assert TextStream(Bytes(), special=True).feed(256) == "<end>"  # type: ignore[arg-type]


stops_and_text = st.tuples(
    st.lists(st.text("ab", max_size=4), max_size=3), st.lists(st.text("ab", max_size=3), max_size=12)
)


@given(stops_and_text)
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(case):
    stops, pieces = case
    whole = "".join(pieces)
    guard, out = StopStrings(stops), ""
    for n, piece in enumerate(pieces):
        out += guard.feed(piece)
        fed = "".join(pieces[: n + 1])
        ends = [fed.find(s) for s in stops if s and s in fed]
        assert (guard.hit is not None) == bool(ends)  # told at once
        if ends:
            assert out == fed[: min(ends)] or any(s and s in fed[: len(fed) - len(piece)] for s in stops)
            break
        assert fed.startswith(out)
    else:
        assert out + guard.flush() == whole
    if guard.hit is not None:
        assert guard.flush() == "" and guard.feed("more") == ""
        assert all(s not in out for s in stops if s)


@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=12))
def test_only_what_may_begin_a_stop_string_is_withheld(stop, text):
    guard = StopStrings([stop])
    out = "".join(guard.feed(c) for c in text)
    if guard.hit is None:
        held = text[len(out) :]
        assert stop.startswith(held) and len(held) < len(stop)
        assert not any(stop.startswith(text[i:]) for i in range(len(out)))  # no more could be withheld
    else:
        assert out == text[: text.find(stop)]


def test_the_earliest_stop_string_wins():
    guard = StopStrings(["</s>", "User:", "s>"])
    assert guard.feed("Hello </") == "Hello "
    assert guard.hit is None
    assert guard.feed("s> User:") == ""
    assert guard.hit == "</s>"


def test_of_two_at_the_same_place_the_longer_one_is_told():
    guard = StopStrings(["ab", "abc", ""])
    assert guard.feed("xabc") == "x"
    assert guard.hit == "abc"


def test_no_stop_strings_withhold_nothing():
    guard = StopStrings([])
    assert guard.feed("anything") == "anything"
    assert (guard.hit, guard.flush()) == (None, "")
