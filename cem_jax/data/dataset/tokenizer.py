"""SentencePiece tokenizers: loading, exact encoding and decoding."""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import sentencepiece

from cem_jax.errors import UserError
from cem_jax.storage.paths import any_path

SEPARATORS = ("bos", "eos", "both")
_SPACE_MARK = "\u2581"  # SentencePiece's space; a literal one would be decoded as a space
_LFS_POINTER = b"version https://git-lfs"
_CUT_AFTER = 1500  # characters: SentencePiece slows down as texts grow
_LONGEST = 1 << 20  # characters encoded at once: each needs some 50 bytes
_BEFORE_WORD = re.compile(rf"(?<=[^\s{_SPACE_MARK}]) (?=\w)")
_PROBE = "Some words, 12 of them, (x = 3); and\n  a line: été 汉字 end"


class Tokenizer:
    """A SentencePiece model (a Llama or Mistral `.model`, or one made by `cem tokenizer`).

    Text never turns into control tokens: a literal `<s>` becomes ordinary pieces. Models without
    a dummy prefix but with byte fallback (our own) are exact: `decode(encode(text)) == text`.

    Raises UserError when the bytes are not a SentencePiece model; `name` is for the message.
    """

    def __init__(self, model_bytes: bytes, name: str = "tokenizer"):
        if model_bytes.startswith(_LFS_POINTER):
            raise UserError(f"{name} is a Git LFS pointer, not the model: run `git lfs pull`")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model_bytes)
        except RuntimeError:
            raise UserError(
                f"{name} is not a SentencePiece model: give a .model file such as `cem tokenizer` "
                "writes or as come with Llama and Mistral"
            ) from None
        self.name = name
        self.model_bytes = model_bytes
        self.hash = "sha256:" + hashlib.sha256(model_bytes).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id = _existing(self._processor.bos_id())
        self.eos_id = _existing(self._processor.eos_id())
        self.unknown_id: int = self._processor.unk_id()  # with byte fallback, no text becomes it
        self._space_mark_ids = self._find_space_mark_ids()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a `.model` file; raise UserError if it is missing or not a SentencePiece model."""
        try:
            model_bytes = any_path(path).read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path} cannot be read: {error.strerror}") from None
        return cls(model_bytes, name=str(path))

    def __reduce__(self):  # pickled for worker processes
        return Tokenizer, (self.model_bytes, self.name)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without separators.

        Raises UserError when the text contains lone surrogates, which UTF-8 cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}"
            ) from None
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of many valid texts, encoded in this thread."""
        ids = self._processor.encode(list(texts), out_type=int, num_threads=1)
        if self._space_mark_ids:
            for i, text in enumerate(texts):
                if _SPACE_MARK in text:
                    ids[i] = self._encode_around_marks(text)
        return ids

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """Regroup a text's pieces into parts whose ids make up the ids of the whole.

        Parts end before a space that no token can span, so that long texts take neither more time
        per character nor more memory than short ones. A text of more than a million characters
        without such a space, or whose tokenizer has none, is cut nevertheless.
        """
        keep_space, cut_after = self._cuts
        held = ""
        for piece in pieces:
            held += piece
            start = 0
            while len(held) - start > cut_after:
                found = _BEFORE_WORD.search(held, start + cut_after, start + _LONGEST)
                if found is None and len(held) - start < _LONGEST:
                    break
                end = found.start() if found else start + _LONGEST
                yield held[start:end]
                start = end + (found is not None and not keep_space)
            held = held[start:]
        if held:
            yield held

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; control tokens give nothing, broken UTF-8 gives U+FFFD.

        Raises ValueError when an id lies outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"ids {min(ids)}..{max(ids)} outside [0, {self.vocab_size})")
        return self._processor.decode(ids)

    def separator_ids(self, policy: str) -> tuple[list[int], list[int]]:
        """Return the ids (before, after) each document under `bos`, `eos` or `both`.

        Raises UserError when the tokenizer lacks a piece that the policy needs.
        """
        if policy not in SEPARATORS:
            raise UserError(f"separator {policy!r} is not one of {', '.join(SEPARATORS)}")
        wanted = {"bos": policy in ("bos", "both"), "eos": policy in ("eos", "both")}
        found = {"bos": self.bos_id, "eos": self.eos_id}
        lacking = [name for name, needed in wanted.items() if needed and found[name] is None]
        if lacking:
            usable = [name for name, piece in found.items() if piece is not None]
            hint = f"use --separator {usable[0]}" if usable else "train one with `cem tokenizer`"
            raise UserError(
                f"{self.name} has no {' and no '.join(lacking)} piece, which separator "
                f"{policy!r} needs: {hint}"
            )
        before = [self.bos_id] if wanted["bos"] else []
        after = [self.eos_id] if wanted["eos"] else []
        return before, after

    def _find_space_mark_ids(self) -> list[int]:
        """Return the byte pieces of a literal U+2581; [] if encoding around it is not exact."""
        pieces = [f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode()]
        ids = [self._processor.piece_to_id(piece) for piece in pieces]
        first = self._processor.encode("a", out_type=int)[:1]
        has_prefix = bool(first) and self._processor.id_to_piece(first[0]).startswith(_SPACE_MARK)
        exact = not has_prefix and all(self._processor.is_byte(i) for i in ids)
        return ids if exact else []

    @functools.cached_property
    def _cuts(self) -> tuple[bool, int]:
        """(whether the part after a cut keeps its space, the characters between cuts)."""
        ids = range(self._processor.vocab_size())
        pieces = map(self._processor.id_to_piece, ids)
        spanning = any(re.search(f"[^ {_SPACE_MARK}][ {_SPACE_MARK}]", piece) for piece in pieces)
        places = [found.start() for found in _BEFORE_WORD.finditer(_PROBE)]
        whole = self.encode_batch([_PROBE])[0]
        for keep in (True, False):
            halves = [(_PROBE[:i], _PROBE[i + (not keep) :]) for i in places]
            encoded = [self.encode_batch(pair) for pair in halves]
            exact = all(first + second == whole for first, second in encoded)
            if exact and not spanning:
                # BPE ranks its merges, which are local. Unigram sums scores, and a sum's rounding
                # depends on where it began.
                scores = map(self._processor.get_score, ids)
                ranks = all(score == int(score) for score in scores)
                return keep, _CUT_AFTER if ranks else _LONGEST // 2
        return True, _LONGEST

    def _encode_around_marks(self, text: str) -> list[int]:
        parts = self._processor.encode(text.split(_SPACE_MARK), out_type=int)
        ids = list(parts[0])
        for part in parts[1:]:
            ids += self._space_mark_ids + part
        return ids


def _existing(piece_id: int) -> int | None:
    return piece_id if piece_id >= 0 else None
