"""Arguments of the commands that make datasets: tokenizer, prepare."""

import argparse
import os
from typing import Annotated, Any

from cem_jax.arguments.common import COUNT, local_path, text, value
from cem_jax.config.values import Range


def add(commands: Any) -> None:
    tokenizer = commands.add_parser("tokenizer", help="train a SentencePiece tokenizer")
    _add_inputs(tokenizer, required=True)
    tokenizer.add_argument("--output", type=local_path, required=True, metavar="FILE")
    tokenizer.add_argument(
        "--vocab-size", type=value(Annotated[int, Range(low=2)]), required=True, metavar="N"
    )

    tokenizer.add_argument(
        "--model-type",
        choices=("bpe", "unigram"),
        default="bpe",
        help="both with byte fallback, so that any text can be written (default: %(default)s)",
    )
    tokenizer.add_argument(
        "--sample-mb",
        type=value(COUNT),
        default=32,
        metavar="N",
        help="megabytes of text to learn from, taken from all files in equal shares; learning "
        "takes about 20 times that in memory (default: %(default)s)",
    )

    prepare = commands.add_parser(
        "prepare", help="turn text into a dataset of token shards, or check one"
    )
    _add_inputs(prepare, required=False)
    prepare.add_argument(
        "--tokenizer", type=local_path, metavar="FILE", help="a SentencePiece .model"
    )
    prepare.add_argument(
        "--output",
        type=local_path,
        metavar="DIR",
        help="the dataset; it appears when it is complete, and the same command goes on with one "
        "that was interrupted; on a complete one it says so, and another command is refused",
    )
    prepare.add_argument(
        "--separator",
        choices=("bos", "eos", "both"),
        default="bos",
        help="token between documents (default: %(default)s)",
    )
    prepare.add_argument(
        "--source-field",
        type=text,
        metavar="NAME",
        help="field whose values name sources, such as meta.redpajama_set_name: each becomes a "
        "stream of its own, to be weighted in data.mixture and evaluated by itself",
    )
    prepare.add_argument(
        "--validation-fraction",
        type=value(Annotated[float, Range(low=0, below=1)]),
        metavar="F",
        help="share of the documents, chosen by hash, that becomes the validation split (0.01)",
    )
    prepare.add_argument(
        "--workers",
        type=value(COUNT),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; the result is the same for every number (default: %(default)s)",
    )
    prepare.add_argument(
        "--skip-bad-files",
        action="store_true",
        help="report bad files, keep what comes before the fault, and go on",
    )
    prepare.add_argument(
        "--check", type=local_path, metavar="DIR", help="check an existing dataset"
    )
    prepare.set_defaults(problems=_prepare_problems)


def _add_inputs(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--input",
        type=text,
        nargs="+",
        required=required,
        metavar="PATH",
        help="files, folders, globs, or URLs of them (gs://, s3://, hf://, with fsspec): .txt (a "
        "file is a document), .jsonl, .json (an array, or lines) and .parquet, each also packed "
        "as .gz, .zst, .xz or .bz2",
    )
    parser.add_argument(
        "--text-column",
        type=text,
        default="text",
        metavar="NAME",
        help="field of .jsonl, .json and .parquet records; a.b is a field in a field "
        "(default: %(default)s)",
    )


def _prepare_problems(args: argparse.Namespace) -> list[str]:
    needed = {"--input": args.input, "--tokenizer": args.tokenizer, "--output": args.output}
    if args.check is not None:
        extra = [flag for flag, value in needed.items() if value is not None]
        return [f"--check goes without {', '.join(extra)}"] if extra else []
    missing = [flag for flag, value in needed.items() if value is None]
    return [f"prepare needs {', '.join(missing)} (or --check DIR)"] if missing else []
