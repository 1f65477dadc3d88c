"""The commands of `cem`, one module each.

A module's `add(commands)` declares the command and its arguments on argparse's subparsers, and its
`run(args)` does the work. Whatever is slow to import is imported inside `run`, so that `cem --help`
and mistakes in flags are answered at once.
"""

COMMANDS = (
    "tokenizer",
    "prepare",
    "train",
    "verify",
    "inspect",
    "compile",
    "eval",
    "generate",
    "export",
    "import_",
    "sweep",
    "synthetic",
    "report",
    "demo",
)  # the modules, in the order in which `cem --help` lists them
