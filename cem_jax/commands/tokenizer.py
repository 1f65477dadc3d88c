"""`cem tokenizer`: train a SentencePiece tokenizer."""

import argparse
import sys
from typing import Any

from cem_jax.commands.arguments import COUNT, INDEX, add_inputs, local_path, number, text


def add(commands: Any) -> None:
    command = commands.add_parser("tokenizer", help="train a SentencePiece tokenizer")
    add_inputs(command, required=True)
    command.add_argument("--output", type=local_path, required=True, metavar="FILE")
    command.add_argument("--vocab-size", type=number(int, low=2), required=True, metavar="N")
    command.add_argument(
        "--model-type",
        choices=("bpe", "unigram"),
        default="bpe",
        help="both have byte fallback, so that any text can be encoded (default: %(default)s)",
    )
    command.add_argument(
        "--sample-mb",
        type=COUNT,
        default=32,
        metavar="N",
        help="megabytes of text to train on, in equal shares from all files, spread over the whole "
        "of each; training needs about 20 times that in memory (default: %(default)s)",
    )
    command.add_argument(
        "--symbols",
        type=text,
        nargs="+",
        default=(),
        metavar="TEXT",
        help="control pieces to add, such as <|user|>; no text is encoded as them",
    )
    command.add_argument(
        "--reserve",
        type=INDEX,
        default=0,
        metavar="N",
        help="add N more control pieces, <|reserved_0|> and so on, to name later",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and write the tokenizer; return its numbers. Raises what `train_tokenizer` raises."""
    from cem_jax.data.corpus.tokenizer_training import train_tokenizer

    return train_tokenizer(
        args.input,
        args.output,
        args.vocab_size,
        column=args.text_column,
        model_type=args.model_type,
        sample_bytes=args.sample_mb * 1_000_000,
        symbols=[*args.symbols, *(f"<|reserved_{i}|>" for i in range(args.reserve))],
        out=sys.stderr if args.json else sys.stdout,
    )
