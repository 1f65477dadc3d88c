"""The commands' arguments, one module a family; `cem_jax.cli` parses and dispatches.

A module's `add(commands)` adds its commands to argparse's subparsers. What one argument's type
cannot check is a function set as a parser's default `problems`: arguments -> list of messages.
"""

from cem_jax.arguments import configs, data, exchange, experiments, runs

FAMILIES = (data, configs, runs, exchange, experiments)
