"""The commands of `cem`, one module each.

A module's `add(commands)` declares the command and its arguments on argparse's subparsers, and its
`run(args)` does the work. Slow imports are made inside `run`, so that `cem --help` and mistakes in
flags are answered at once.
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
)  # modules, in the order in which `cem --help` lists them
