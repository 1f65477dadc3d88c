"""Train SentencePiece models with which code and text round-trip exactly."""

import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

import sentencepiece

from cem_jax.data.corpus.compression import BadFile
from cem_jax.data.corpus.files import SourceFile, find_files
from cem_jax.data.corpus.large_json import BadRecord
from cem_jax.data.corpus.readers import Fields, Piece, read_document, read_records
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError
from cem_jax.storage.durable import write_durably
from cem_jax.storage.paths import any_path

SAMPLE_BYTES = 32_000_000  # text that the trainer sees; BPE needs about 20 times that in memory
_LEAST_SHARE = 64 << 10  # per file read; if there are too many files, some are left out
_STRETCH = 64 << 10  # bytes of a long document taken in one place
_CHUNK_CHARS = 2000
_THREADS = 16  # recorded in the model, so that its bytes would depend on the CPUs
# The trainer drops every sentence that contains one of its own marks, and no piece can contain NUL.
# Text is cut at these characters instead; byte fallback still encodes them, a tab as one token.
_CUTS = re.compile("[\t\0\u2581\u2585]+")


def train_tokenizer(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    vocab_size: int,
    *,
    column: str = "text",
    model_type: str = "bpe",
    sample_bytes: int = SAMPLE_BYTES,
    symbols: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> dict[str, Any]:
    """Train a tokenizer on a sample of a corpus, without its validation and test folders.

    Writes `output` and prints a summary to `out`. Raises UserError for inputs that cannot be read
    and for a vocabulary size that does not suit them.
    """
    started = time.monotonic()
    output = any_path(output)
    if output.is_dir():
        raise UserError(f"--output {output} is a directory: name a .model file")
    files = find_files(inputs).files
    training = [file for file in files if file.split in (None, "train")] or files
    documents = sample_documents(training, column=column, sample_bytes=sample_bytes)
    tokenizer = Tokenizer(train_model(documents, vocab_size, model_type, symbols))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_durably(output, tokenizer.model_bytes)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    size = sum(len(text.encode()) for text in documents)
    measured = documents[:: max(1, len(documents) // 200)]
    tokens = sum(map(len, tokenizer.encode_batch(measured)))
    result = {
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.hash,
        "output": str(output),
        "documents": len(documents),
        "bytes": size,
        "bytes_per_token": sum(len(text.encode()) for text in measured) / max(1, tokens),
        "seconds": round(time.monotonic() - started, 2),
    }
    print(
        f"{output}: {tokenizer.vocab_size:,} pieces learnt from {len(documents):,} documents, "
        f"{size / 1e6:.1f} MB; {result['bytes_per_token']:.2f} bytes per token on its training "
        f"text; {result['seconds']:.0f} s",
        file=out,
    )
    return result


def train_model(
    documents: Iterable[str],
    vocab_size: int,
    model_type: str = "bpe",
    symbols: Sequence[str] = (),
) -> bytes:
    """Return a serialized SentencePiece model with byte fallback; unk 0, bos 1, eos 2, no pad.

    Nothing is normalized and no space is added, so that text survives exactly. Newlines stay
    inside sentences: pieces such as `):⏎` and runs of indentation are learnt.

    `symbols` become control pieces after these, which no text is encoded as.

    Raises UserError when the vocabulary size does not suit the sample.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chunks(documents),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            normalization_rule_name="identity",
            max_sentence_length=16 * _CHUNK_CHARS,
            num_threads=_THREADS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            control_symbols=list(symbols),
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(_explain(str(error), vocab_size)) from None
    return model.getvalue()


def sample_documents(files: Sequence[SourceFile], *, column: str, sample_bytes: int) -> list[str]:
    """Return at most about `sample_bytes` of text, in equal shares from the files.

    A share is spread over the whole file, which is therefore read to its end. What small files
    leave of their share goes to the larger ones; of very many files, only every n-th is read. Bad
    records are skipped. Raises UserError for a bad file, and for a corpus
    without any usable document.
    """
    if sum(file.size for file in files) > sample_bytes:
        files = files[:: -(-len(files) * _LEAST_SHARE // sample_bytes)]
    documents: list[str] = []
    left = sample_bytes
    problems = []
    for done, file in enumerate(sorted(files, key=lambda file: file.size)):
        share = left // (len(files) - done)
        try:
            for text in _spread(file, column, share):
                documents.append(text)
                left -= len(text.encode())
        except BadFile as bad:
            problems.append(f"{file.path}: {bad}")
    if problems:
        raise UserError(*problems)
    if not documents:
        shown = ", ".join(str(file.path) for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise UserError(
            f"no usable document in {shown}: empty, not UTF-8 text, or without a field {column!r}"
        )
    return documents


def _spread(file: SourceFile, column: str, share: int) -> Iterator[str]:
    """Yield about `share` bytes of text, as much from each part of the file."""
    position = taken = 0

    def reached(place: int) -> None:
        nonlocal position
        position = place

    fields = Fields(column)
    for record in read_records(file.path, fields, reached):
        size = record.size()
        room = share * min(position + size, file.size) // file.size - taken
        if room < min(size, _STRETCH, share):
            continue  # rather a whole record later than a few words of each
        try:
            text = "".join(_stretches(read_document(record, fields)[1], room, size))
        except BadRecord:
            continue
        if text:
            yield text
        taken += len(text.encode())


def _stretches(pieces: Iterable[Piece], room: int, size: int) -> Iterator[str]:
    """Yield at most `room` bytes, from everywhere in a document of at most `size` bytes."""
    seen = taken = 0
    for piece in pieces:
        for start in range(0, len(piece.utf8), _STRETCH):
            stretch = piece.utf8[start : start + _STRETCH]
            seen += len(stretch)
            allowed = room if size <= room else room * min(seen, size) // size
            part = stretch[: max(0, allowed - taken)]
            taken += len(part)
            yield part.decode(errors="ignore")


def _chunks(documents: Iterable[str]) -> Iterator[str]:
    """Yield pieces of about `_CHUNK_CHARS`, cut after newlines if there are any."""
    for document in documents:
        for part in _CUTS.split(document):
            start = 0
            while start < len(part):
                end = start + _CHUNK_CHARS
                newline = part.rfind("\n", start, end) if end < len(part) else -1
                end = newline + 1 if newline >= start else end
                yield part[start:end]
                start = end


def _explain(message: str, vocab_size: int) -> str:
    most = re.search(r"value <= (\d+)", message)
    if most:
        return f"--vocab-size {vocab_size} is too large for this text: at most {most[1]}"
    least = re.search(r"required_chars\D*\d+ vs (\d+)", message)
    if least:
        return (
            f"--vocab-size {vocab_size} is too small: 256 byte pieces, control pieces and the "
            f"characters of this text need {least[1]}"
        )
    reason = message.rpartition("] ")[2] or message  # without the place in its source code
    return f"SentencePiece could not learn {vocab_size} pieces from this text: {reason}"
