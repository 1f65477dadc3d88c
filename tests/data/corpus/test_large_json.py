"""JSON parsed in pieces, compared with Python's own parser on the whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.large_json import BadRecord, LongString, array_elements, parse_cut
from cem_jax.data.corpus.limits import Limits
from cem_jax.data.corpus.readers import Fields, Record, read_document

# Where a cut could go wrong: quotes, backslashes, controls, characters of one to four bytes.
ALPHABET = 'ab"\\/\n\t\0 ,:[]{}é汉🚀\u2028'
TEXTS = st.text(ALPHABET, max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


SMALL = Limits(long_json=0, long_string=6, piece=7)  # cuts everything into pieces of a few bytes


def document(raw, fields=None):
    fields = fields or Fields("text")
    source, pieces = read_document(Record(1, raw, is_json=True), fields, SMALL)
    return source, "".join(piece.text for piece in pieces)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS.filter(lambda text: text.strip()), ascii_only=st.booleans(), more=VALUES)
def test_text_in_pieces_is_the_text(text, ascii_only, more):
    raw = json.dumps({"more": more, "text": text, "end": more}, ensure_ascii=ascii_only).encode()
    assert document(raw)[1] == text


@settings(deadline=None, max_examples=200)
@given(text=st.text('\\"u0dnaé', max_size=40))
def test_runs_of_backslashes(text):
    raw = json.dumps({"text": text + "x"}).encode()
    assert document(raw)[1] == text + "x"


@pytest.mark.parametrize("before", range(12))
def test_surrogate_pairs_are_joined_and_lone_ones_mended(before):
    filler = "a" * before
    assert document(b'{"text": "%b\\ud83d\\ude80 b"}' % filler.encode())[1] == filler + "🚀 b"
    _, pieces = read_document(
        Record(1, b'{"text": "%b\\ud83d b\\ude80"}' % filler.encode(), is_json=True),
        Fields("text"),
        SMALL,
    )
    pieces = list(pieces)
    assert "".join(piece.text for piece in pieces) == filler + "\ufffd b\ufffd"
    assert any(piece.mended for piece in pieces)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"text": "aaaaaaaa\nbbbb"}', "invalid_json"),
        (b'{"text": "aaaaaaaa\\x bbbb"}', "invalid_json"),
        (b'{"text": "aaaaaaaaaaaa', "invalid_json"),
        (b'{"text": "aaaaaaaaaaaa"', "invalid_json"),
        (b'{"text": "aaaaaaaaaaaa\\"}', "invalid_json"),
        (b'{"text": "aaaaaaaaa\xff\xfeaaa"}', "invalid_utf8"),
        (b'{"text": "\\u0020\\u0020         \\n\\n\\n\\n\\n"}', "empty_text"),
        (b'{"more": "aaaaaaaaaaaa"}', "missing_column"),
        (b'["text", "aaaaaaaaaaaa"]', "not_an_object"),
        (b'{"text": ["aaaaaaaaaaaa"]}', "not_a_string"),
        (b'{"text": "aaaa"} {"text": "bbbb"}', "invalid_json"),
    ],
)
def test_reasons_for_dropping_a_long_record(raw, reason):
    with pytest.raises(BadRecord, match=reason):
        document(raw)


def test_fields_within_fields():
    raw = b'{"a": {"b": {"c": "deep text"}, "b.c": "flat"}, "a.b": {"c": "first"}, "s": {"n": "x"}}'
    assert document(raw, Fields("a.b.c", "s.n")) == ("x", "flat")
    assert document(b'{"a": {"b": "text b"}, "a.b": "text ab"}', Fields("a.b"))[1] == "text ab"
    with pytest.raises(BadRecord, match="missing_column"):
        document(raw, Fields("a.b.d"))
    with pytest.raises(BadRecord, match="missing_column"):
        document(b'{"a": "text"}', Fields("a.b"))
    assert document(b'{"text": "text"}', Fields("text", "s.n"))[0] is None


@pytest.mark.parametrize("literal", [b"cut0", b"cut-0", b'"cut"'])
def test_names_of_cut_strings_do_not_occur_in_the_record(literal):
    raw = b'{"other": "%b", "text": "the real text"}' % literal.strip(b'"')
    value, strings = parse_cut(raw, SMALL)
    assert not any(name.encode() in raw for name in strings)
    assert "".join(strings[value["text"]].pieces(SMALL.piece)) == "the real text"


@settings(deadline=None, max_examples=300)
@given(
    elements=st.lists(VALUES, max_size=5), indent=st.sampled_from([None, 1]), size=st.integers(1, 9)
)
def test_arrays_are_cut_into_their_elements(elements, indent, size):
    raw = json.dumps(elements, indent=indent, ensure_ascii=False).encode() + b"\n"
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
    found = list(array_elements(iter(chunks)))
    assert [json.loads(element) for _, element in found] == elements
    if indent and all(not isinstance(e, dict | list) for e in elements):
        assert [line for line, _ in found] == list(range(2, 2 + len(elements)))


@settings(deadline=None, max_examples=200)
@given(elements=st.lists(VALUES, min_size=1, max_size=4), share=st.floats(0, 0.999))
def test_a_truncated_array_is_a_bad_file(elements, share):
    raw = json.dumps(elements).encode()
    with pytest.raises(BadFile):
        list(array_elements(iter([raw[: int(share * len(raw))]])))


def test_invalid_elements_are_bad_records():
    raw = b'[{"text": "a"}, {"text": nonsense}, {"text": "\xff"}, {"text": "b"},]'
    texts = []
    for _, element in array_elements(iter([raw])):
        try:
            texts.append(document(element)[1])
        except BadRecord as bad:
            texts.append(str(bad))
    assert texts == ["a", "invalid_json", "invalid_utf8", "b", "invalid_json"]


def test_an_element_that_is_too_long():
    chunks = (b'["' if i == 0 else b"x" * 100 for i in range(100))
    with pytest.raises(BadFile, match="more than 1,000 bytes at line 1"):
        list(array_elements(chunks, largest=1000))


def test_pieces_do_not_depend_on_where_they_are_cut():
    text = 'a\\"b\\\\ é汉🚀 \\u00e9\\ud83d\\ude80\\n' * 20
    raw = text.encode()
    whole = json.loads(f'"{text}"')
    for size in range(7, 60):  # more than the longest escape
        assert "".join(LongString(raw, 0, len(raw)).pieces(size)) == whole
