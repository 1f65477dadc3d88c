"""A complete dataset and the command that made it, for when `cem prepare` is given again.

dataset.json keeps the command as the journal of an unfinished one does (see workplace.py): what
the tokens depend on, with a digest of the input files' paths, sizes and times. Datasets of
versions that kept none are like any other directory that is not empty.
"""

import os
from pathlib import Path
from typing import Any

from cem_jax.data.corpus.workspace import changes
from cem_jax.data.dataset.store import DESCRIPTION, open_dataset, read_description
from cem_jax.errors import UserError

INPUT_FILES = "input files"  # of a command


def was_made(output: str | os.PathLike[str]) -> bool:
    """Whether `output` is a dataset that says which command made it."""
    output = Path(output)
    if output.is_symlink() or not os.path.isfile(output / DESCRIPTION):
        return False
    try:
        return isinstance(read_description(output).get("command"), dict)
    except (UserError, AttributeError):  # of something else, or damaged
        return False


def require_made_by(output: Path, command: dict[str, Any], skip_bad_files: bool) -> dict[str, Any]:
    """The description of the dataset in `output`, which `was_made`, by this very command.

    Raises UserError with what differs, or with what its files lack; contents are not read.
    """
    try:
        open_dataset(output)
    except UserError as error:
        advice = f"--output {output} is a damaged dataset: remove it, or name a new directory"
        raise UserError(*error.messages, advice) from None
    description = read_description(output)
    then = description["command"]
    changed = changes(then, command)
    if description["bad_files"] and not skip_bad_files:
        changed.append(f"--skip-bad-files: {description['bad_files']} skipped there, not given now")
    if not changed:
        return description
    if then != command == then | {INPUT_FILES: command[INPUT_FILES]}:
        why = "the input files have changed since it was made of them"
    else:
        why = "another command made it"
    raise UserError(
        f"--output {output} is a complete dataset, and {why}: name a new directory, or remove "
        "that one. What differs:",
        *changed,
    )
