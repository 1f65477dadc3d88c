"""`cem <command>`: parse, dispatch, exit codes. A command's code is imported only when it runs.

Exit codes: 0 done · 2 the user's input (`cem: error: …` lines, no traceback) · 130 interrupted ·
1 anything else, a failed verification and a step that does not fit included.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cem_jax.errors import RunFailed, UserError
from cem_jax.overrides import Range, parse, split_flags

_RUNS = {
    "train": "cem_jax.train.loop",
    "eval": "cem_jax.evaluate",
    "generate": "cem_jax.generate",
    "inspect": "cem_jax.summary",
    "compile": "cem_jax.compile",
    "verify": "cem_jax.verify",
    "tokenizer": "cem_jax.data.tokenizer",
    "prepare": "cem_jax.data.prepare",
    "demo": "cem_jax.demo",
}
_WITH_CONFIG = ("train", "verify", "inspect", "compile")
_COUNT = Annotated[int, Range(low=1)]
_INDEX = Annotated[int, Range(low=0)]
_SEED = Annotated[int, Range(low=0, high=2**32 - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        return _dispatch(args)
    except UserError as error:
        _complain(*error.messages)
        return 2
    except RunFailed as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command's arguments, checked. Raises UserError with every problem that is found.

    A command with --config gets `overrides`, the (dotted field, text) pairs of its flags.
    """
    problems: list[str] = []
    overrides: list[tuple[str, str]] = []
    takes_overrides = bool(argv) and argv[0] in _WITH_CONFIG
    if takes_overrides:
        argv, overrides, problems = split_flags(argv)
    try:
        args, stray = _parser().parse_known_args(argv)
    except UserError as error:
        raise UserError(*problems, *error.messages) from None
    problems += [_explain_stray(argument, takes_overrides) for argument in stray]
    if args.command == "prepare":
        problems += _prepare_problems(args)
    if problems:
        raise UserError(*problems)
    if takes_overrides:
        args.overrides = overrides
    if args.command == "generate" and args.prompt is None:
        args.prompt = _standard_input()
    return args


def _dispatch(args: argparse.Namespace) -> int:
    if not args.json:
        result = _run(args)
    else:
        with _stdout_to_stderr():
            result = _run(args)
        if result is not None:
            print(json.dumps(_plain(result), allow_nan=False), flush=True)
    verdicts = () if result is None else (result.get("passed"), result.get("fits"))
    return 1 if any(verdict is False for verdict in verdicts) else 0


def _run(args: argparse.Namespace) -> dict[str, Any] | None:
    """The command's result; None in a process that leaves it to another one to tell."""
    return importlib.import_module(_RUNS[args.command]).run(args)


def _complain(*messages: str) -> None:
    for message in messages:
        print("cem: error:", " ".join(message.split("\n")), file=sys.stderr)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what Python code, and libraries below it, write to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy and JAX scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a UserError instead of a usage text and an exit."""

    def __init__(self, **settings: Any):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        print(f"cem_jax {version('cem_jax')}")
        parser.exit()


def _value(annotation: Any) -> Callable[[str], Any]:
    """An argparse type that reads and checks a value as configuration fields do."""

    def convert(text: str) -> Any:
        try:
            return parse(text, annotation)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from None
    return text


def _prompt(text: str) -> str:
    return _text(text) if text else ""


def _standard_input() -> str:
    """The prompt from a pipe or file, less one final newline; empty at a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on standard input is not valid UTF-8: {error}") from None


def _explain_stray(argument: str, takes_overrides: bool) -> str:
    name = argument.lstrip("-")
    if takes_overrides and name.startswith("config."):
        return f"{argument}: an override starts with two dashes: --{name}"
    return f"unrecognized argument: {argument}"


def _prepare_problems(args: argparse.Namespace) -> list[str]:
    needed = {"--input": args.input, "--tokenizer": args.tokenizer, "--output": args.output}
    if args.check is not None:
        extra = [flag for flag, value in needed.items() if value is not None]
        return [f"--check goes without {', '.join(extra)}"] if extra else []
    missing = [flag for flag, value in needed.items() if value is None]
    return [f"prepare needs {', '.join(missing)} (or --check DIR)"] if missing else []


def _parser() -> _Parser:
    parser = _Parser(
        prog="cem", description="Pretrain and verify Causal Energy Minimization language models."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    _add_data_commands(commands)
    _add_config_commands(commands)
    _add_run_commands(commands)
    demo = commands.add_parser("demo")  # used by `make demo`; not listed
    demo.add_argument("--workdir", type=_text, default="runs/demo", metavar="DIR")
    for command in commands.choices.values():
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on standard output"
        )
    return parser


def _add_data_commands(commands: Any) -> None:
    tokenizer = commands.add_parser("tokenizer", help="train a SentencePiece tokenizer")
    _add_inputs(tokenizer, required=True)
    tokenizer.add_argument("--output", type=_text, required=True, metavar="FILE")
    tokenizer.add_argument(
        "--vocab-size", type=_value(Annotated[int, Range(low=2)]), required=True, metavar="N"
    )

    prepare = commands.add_parser(
        "prepare", help="turn text into a dataset of token shards, or check one"
    )
    _add_inputs(prepare, required=False)
    prepare.add_argument("--tokenizer", type=_text, metavar="FILE")
    prepare.add_argument("--output", type=_text, metavar="DIR")
    prepare.add_argument(
        "--separator",
        choices=("bos", "eos", "both"),
        default="bos",
        help="token between documents (default: %(default)s)",
    )
    prepare.add_argument(
        "--validation-fraction",
        type=_value(Annotated[float, Range(low=0, below=1)]),
        metavar="F",
        help="share of the documents, chosen by hash, that becomes the validation split (0.01)",
    )
    prepare.add_argument("--workers", type=_value(_COUNT), default=os.cpu_count() or 1, metavar="N")
    prepare.add_argument(
        "--skip-bad-files",
        action="store_true",
        help="report bad files, keep what comes before the fault, and go on",
    )
    prepare.add_argument("--check", type=_text, metavar="DIR", help="check an existing dataset")


def _add_inputs(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--input",
        type=_text,
        nargs="+",
        required=required,
        metavar="PATH",
        help="files or folders: .txt, .jsonl, .parquet, and .gz or .zst of them",
    )
    parser.add_argument(
        "--text-column",
        type=_text,
        default="text",
        metavar="NAME",
        help="field of .jsonl and .parquet records (default: %(default)s)",
    )


def _add_config_commands(commands: Any) -> None:
    for name, words in (
        ("train", "pretrain; the same command again resumes"),
        ("verify", "check that layer updates are the gradients of their energies"),
        ("inspect", "count parameters, FLOPs and memory, beside the Llama twin"),
        ("compile", "compile the training step for hardware that is not here: does it fit?"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            epilog="Any field of the configuration can be set: --config.optimizer.b1=0.9",
        )
        command.add_argument(
            "--config",
            type=_text,
            required=True,
            metavar="FILE",
            help="a Python file with get_config(), or FILE:ARGUMENT",
        )
        if name == "train":
            _add_workdir(command)
            _add_processes(command)
        if name == "compile":
            _add_topology(command)


def _add_processes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "several processes", "Not needed under SLURM or on TPU VMs; see launch/README.md."
    )
    group.add_argument("--coordinator", type=_text, metavar="HOST:PORT", help="of process 0")
    group.add_argument("--processes", type=_value(_COUNT), metavar="N", help="how many there are")
    group.add_argument("--process", type=_value(_INDEX), metavar="I", help="this one, from 0")


def _add_topology(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--topology",
        type=_text,
        required=True,
        metavar="NAME",
        help="TPUs such as v5e:16x16 or v5p:4x4x4, GPUs such as H100:8, or cpu:N",
    )
    command.add_argument(
        "--suggest",
        action="store_true",
        help="try other meshes, remat policies and microbatches; recommend one",
    )


def _add_run_commands(commands: Any) -> None:
    evaluate = commands.add_parser("eval", help="loss, perplexity and bits per byte of a split")
    _add_workdir(evaluate)
    evaluate.add_argument("--split", type=_text, metavar="NAME", help="default: eval.split")
    evaluate.add_argument("--batch", type=_value(_COUNT), metavar="N", help="windows at a time")

    generate = commands.add_parser("generate", help="continue a prompt")
    _add_workdir(generate)
    generate.add_argument(
        "--prompt", type=_prompt, metavar="TEXT", help="default: standard input, unless a terminal"
    )
    generate.add_argument("--max-tokens", type=_value(_INDEX), default=128, metavar="N")
    generate.add_argument(
        "--temperature",
        type=_value(Annotated[float, Range(low=0)]),
        default=1.0,
        metavar="X",
        help="0: always the likeliest token (default: %(default)s)",
    )
    generate.add_argument("--top-k", type=_value(_COUNT), metavar="K")
    generate.add_argument(
        "--top-p", type=_value(Annotated[float, Range(above=0, high=1)]), metavar="P"
    )
    generate.add_argument("--seed", type=_value(_SEED), default=0, metavar="N")

    for command in (evaluate, generate):
        command.add_argument(
            "--step", type=_value(_INDEX), metavar="N", help="checkpoint; default: the latest"
        )
        for sublayer in ("attention", "mlp"):
            command.add_argument(
                f"--{sublayer}-steps",
                type=_value(_COUNT),
                metavar="T",
                help=f"run the {sublayer} sublayers for T steps instead",
            )


def _add_workdir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workdir", type=_text, required=True, metavar="DIR", help="the run's directory"
    )
