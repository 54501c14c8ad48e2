"""Where an answer ends and what of its text is shown when, with decoders that split characters and drop spaces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from medusa_core.errors import InputError
from medusa_core.sampling import SamplingParams
from medusa_core.stopping import StopChecker, StopHit, TextStream, _Characters
from tests import toys

END = 0
WORDS = toys.tokenizer()


def _byte_level() -> Tokenizer:
    """One token per byte, and a few longer: two that end within a character, as real vocabularies have."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = [("Ġ", "â"), ("Ġâ", "Ĥ"), ("Ġ", "a"), ("a", "b"), ("ð", "Ł")]
    vocab = {token: index for index, token in enumerate([*letters, *(a + b for a, b in longer)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=longer))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_fallback() -> Tokenizer:
    """As sentencepiece: spaces within tokens, the first one dropped, unknown characters as bytes (which show as one
    replacement each while any of their run is missing)."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ab", "▁a", "▁b"]
    inner = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


BYTES, FALLBACK = _byte_level(), _byte_fallback()


def _decode_bytes(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids)))


def _decode_fallback(ids: Sequence[int]) -> str:
    return str(FALLBACK.decode(list(ids)))


def _decode_words(ids: Sequence[int]) -> str:
    return str(WORDS.decode(list(ids), skip_special_tokens=True))


def _encode(text: str) -> list[int]:
    return list(BYTES.encode(text).ids)


def _letters(ids: Sequence[int]) -> str:
    """Every token is a letter; token 0 is end-of-text and shows nothing."""
    return "".join(chr(token) for token in ids if token != END)


def _run(checker: StopChecker, tokens: Sequence[int]) -> tuple[int, StopHit | None]:
    """How many tokens the answer takes, and why it ends."""
    for count, token in enumerate(tokens, 1):
        if hit := checker.push(token):
            return count, hit
    return len(tokens), None


def _ords(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("fields", "tokens", "count", "hit", "text"),
    [
        ({}, [*_ords("abc"), END, 97], 4, StopHit("stop", END), "abc"),
        ({"stop_token_ids": [98]}, _ords("abc"), 2, StopHit("stop", 98), "a"),
        ({"max_new_tokens": 2}, _ords("abc"), 2, StopHit("length", None), "ab"),
        # At the last token of the budget, what it is counts before that it is the last.
        ({"max_new_tokens": 3}, [97, 98, END], 3, StopHit("stop", END), "ab"),
        ({"max_new_tokens": 3, "stop": "bc"}, _ords("abc"), 3, StopHit("stop", "bc"), "a"),
        ({"stop": ["xyz", "bcd"]}, _ords("abcde"), 4, StopHit("stop", "bcd"), "a"),
        # The first to be complete, and the longer of two that are complete together.
        ({"stop": ["bcd", "c"]}, _ords("abcde"), 3, StopHit("stop", "c"), "ab"),
        ({"stop": ["c", "bc"]}, _ords("abcde"), 3, StopHit("stop", "bc"), "a"),
        ({"stop": "aab"}, _ords("aaab"), 4, StopHit("stop", "aab"), "a"),
        # What looked like a stop string when the answer ended otherwise is text.
        ({"stop": "bcd"}, [*_ords("abc"), END], 4, StopHit("stop", END), "abc"),
        ({"stop": "bcd"}, _ords("abc"), 3, None, "abc"),
    ],
)
def test_where_an_answer_ends(
    fields: dict[str, Any], tokens: list[int], count: int, hit: StopHit | None, text: str
) -> None:
    """Catches an end missed or a token late, the wrong reason where two hold at once, a cut at the wrong place, and
    the stop token's own text left in the answer."""
    checker = StopChecker(SamplingParams(**fields), [END], _letters)
    assert _run(checker, tokens) == (count, hit)
    assert (checker.hit, checker.text) == (hit, text)


@pytest.mark.parametrize(
    ("minimum", "text", "count"), [(0, "abxab", 2), (1, "abxab", 2), (2, "abxab", 5), (2, "aab", 3), (5, "abxab", 5)]
)
def test_a_stop_string_within_min_new_tokens_does_not_end_the_answer(minimum: int, text: str, count: int) -> None:
    """Catches stop strings that ignore min_new_tokens, a string found early that ends the answer late, and one lost
    because it only began early."""
    checker = StopChecker(SamplingParams(stop="ab", min_new_tokens=minimum), [END], _letters)
    assert _run(checker, _ords(text))[0] == count
    assert checker.hit == (None if minimum == 5 else StopHit("stop", "ab"))
    assert checker.text == (text if minimum == 5 else text[: count - 2])


def test_stop_strings_need_a_decoder_and_nothing_else_does() -> None:
    """Catches a stop string that is silently never looked for."""
    with pytest.raises(InputError, match=r"stop is \['x'\].*decode"):
        StopChecker(SamplingParams(stop="x"), [END])
    checker = StopChecker(SamplingParams(2), [END])
    assert (_run(checker, [5, 6]), checker.text) == ((2, StopHit("length", None)), None)


@pytest.mark.parametrize("stop", ["€", "a€", "😀", "é!"])
def test_a_stop_string_of_characters_that_are_split_over_tokens(stop: str) -> None:
    """Catches a match on half a character, and one that is never found because its bytes came one at a time."""
    tokens = _encode(f"x{stop}y")
    checker = StopChecker(SamplingParams(stop=stop), [], _decode_bytes)
    assert _run(checker, tokens) == (len(tokens) - 1, StopHit("stop", stop))
    assert checker.text == "x"


def test_a_stop_string_in_a_token_that_begins_a_character() -> None:
    """Catches a match that waits for the rest of the next character: ' €' is a token of a space and two bytes more."""
    tokens = _encode("a €")
    assert len(tokens) == 3
    checker = StopChecker(SamplingParams(stop=" "), [], _decode_bytes)
    assert _run(checker, tokens) == (2, StopHit("stop", " "))
    assert checker.text == "a"


def test_a_stop_string_that_ends_within_a_token() -> None:
    """Catches a cut at the token's end instead of the string's beginning, and another winner of two stop strings than
    if the token's letters had come one by one."""
    pieces = ["Hello", " wor", "ld. Us", "er: more"]
    checker = StopChecker(SamplingParams(stop=["User:"]), [], lambda ids: "".join(pieces[i] for i in ids))
    assert _run(checker, range(4)) == (4, StopHit("stop", "User:"))
    assert checker.text == "Hello world. "
    checker = StopChecker(SamplingParams(stop=["ello", "l"]), [], lambda ids: "".join(pieces[i] for i in ids))
    assert (_run(checker, range(4)), checker.text) == ((1, StopHit("stop", "l")), "He")


def test_the_text_of_an_answer_that_ends_within_a_character() -> None:
    """Catches text that differs from what the tokenizer says of the same tokens."""
    tokens = _encode("a€")[:-1]
    checker = StopChecker(SamplingParams(len(tokens)), [], _decode_bytes)
    _run(checker, tokens)
    assert checker.text == _decode_bytes(tokens) == "a\N{REPLACEMENT CHARACTER}"


def test_spaces_that_decoders_put_between_tokens_and_drop_at_the_front() -> None:
    """Catches words run together, as each token decoded alone has no space; special tokens between them too."""
    tokens = [toys.USER, 3, 7, toys.END, toys.ASSISTANT, 9, toys.END, 1]
    stream = TextStream(_decode_words)
    assert [stream.add([token]) for token in tokens] == ["", "w3", " w7", "", "", " w9", "", " w1"]
    checker = StopChecker(SamplingParams(stop="w7 w9"), [toys.END], _decode_words)
    assert (_run(checker, [3, 7, 9]), checker.text) == ((3, StopHit("stop", "w7 w9")), "w3 ")


def test_only_a_short_window_is_decoded() -> None:
    """Catches decoding that is quadratic in the answer's length."""
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return _decode_bytes(ids)

    stream = TextStream(decode, SamplingParams(stop="never"))
    text = "a😀b €" * 200
    assert "".join(stream.add([token]) for token in _encode(text)) + stream.rest() == text
    assert longest <= 8


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    """Catches a part of a stop string shown in a streamed answer, and text held longer than it is in doubt."""
    stream = TextStream(_letters, SamplingParams(stop=["END", "NOW!"]))
    shown = [stream.add([ord(letter)]) for letter in "aENEENOxNOW!b"]
    assert shown == ["a", "", "", "EN", "E", "", "E", "NOx", "", "", "", "", ""]
    assert (stream.stop, stream.text, stream.rest()) == ("NOW!", "aENEENOx", "")


def test_what_is_held_back_at_the_end_comes_last_and_once() -> None:
    """Catches the end of an answer lost because it looked like the beginning of a stop string."""
    stream = TextStream(_letters, SamplingParams(stop="END"))
    assert stream.add(_ords("the EN")) == "the "
    assert (stream.rest(), stream.rest(), stream.text) == ("EN", "", "the EN")


def test_a_stream_stops_where_the_answer_does() -> None:
    """Catches text past a stop string, or of the stop token, when both come within one accepted group, and a stream
    that ends at a stop string (or waits for more of it) where min_new_tokens lets the answer go on."""
    stream = TextStream(_letters, SamplingParams(stop="END"))
    assert stream.add(_ords("abENDcd")) + stream.add(_ords("ef")) + stream.rest() == "ab"
    stream = TextStream(_letters, SamplingParams(stop="END", min_new_tokens=3))
    assert (stream.add(_ords("END")), stream.add(_ords("xENDy"))) == ("END", "x")
    stream = TextStream(_letters, SamplingParams(stop_token_ids=[ord("!")], stop="bc"))
    assert (stream.add(_ords("ab!d")), stream.rest()) == ("ab", "")


TEXTS = st.text(alphabet="ab é€😀\N{REPLACEMENT CHARACTER}", max_size=20)


@given(TEXTS)
def test_pieces_of_whole_characters_make_up_the_text(text: str) -> None:
    """Catches a character shown in halves or lost, with both kinds of byte tokens."""
    for tokens, decode in (
        (_encode(text), _decode_bytes),
        (FALLBACK.encode(text.replace(" ", "▁")).ids, _decode_fallback),
    ):
        characters = _Characters(decode)
        pieces = [characters.add(token) for token in tokens]
        assert "".join(pieces) + characters.rest() == decode(tokens)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


BROKEN = [
    _encode("a"),
    _encode("€"),
    _encode("€")[:2],
    _encode("€")[1:],
    _encode("😀"),
    _encode("😀")[:3],
    _encode(" €")[:1],
]


@given(st.lists(st.sampled_from(BROKEN), max_size=8))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_says(parts: list[list[int]]) -> None:
    """Catches text lost after a byte that never becomes a character."""
    tokens = [token for part in parts for token in part]
    characters = _Characters(_decode_bytes)
    assert "".join(characters.add(token) for token in tokens) + characters.rest() == _decode_bytes(tokens)


@given(TEXTS, st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_end_does_not_depend_on_tokens_or_groups(text: str, stops: list[str], data: st.DataObject) -> None:
    """Catches a stop string missed or found elsewhere because of where tokens or accepted groups begin (tokens of a
    byte, tokens of several letters), and a shown piece that is taken back: against the plain rule, letter by letter
    over the whole text."""
    wanted = next((text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))), None)
    stop = None
    if wanted is None:
        wanted = text
    else:
        stop = max((stop for stop in stops if wanted.endswith(stop)), key=len)
        wanted = wanted[: -len(stop)]
    params = SamplingParams(stop=stops)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text))), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    for tokens, decode in (
        (_encode(text), _decode_bytes),
        (range(len(pieces)), lambda ids: "".join(pieces[index] for index in ids)),
    ):
        stream, shown, at = TextStream(decode, params), "", 0
        while at < len(tokens):
            size = data.draw(st.integers(1, 4))
            shown += stream.add(tokens[at : at + size])
            assert wanted.startswith(shown)
            at += size
        assert (shown + stream.rest(), stream.text, stream.stop) == (wanted, wanted, stop)
        _, hit = _run(StopChecker(params, [], decode), tokens)
        assert hit == (None if stop is None else StopHit("stop", stop))
