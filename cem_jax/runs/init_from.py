"""`cem train --init-from RUN`: start a new run with the parameters of another."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from cem_jax.errors import UserError
from cem_jax.runs.arrays import dtype_and_shape, named_leaves, nested
from cem_jax.runs.checkpoints import Info, Reader
from cem_jax.runs.directory import EXPORTED
from cem_jax.runs.metrics import metrics_so_far
from cem_jax.runs.position import Position
from cem_jax.runs.setup import Setup
from cem_jax.storage.paths import AnyPath, is_url, place
from cem_jax.train.setup import fresh_state
from cem_jax.train.step import TrainState

_PARAMS = "params/"


def initialised_from(
    setup: Setup, origin: str, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]]:
    """Return step 0 with the parameters of the run `origin` whose names, shapes and dtypes match.

    The others keep their random values; `say` reports them. Returns the state and a record:
    {from, checkpoint, taken, fresh, unused}.

    Raises:
      UserError: `origin` has no undamaged checkpoint, or no parameter matches.
    """
    workdir = place(origin)
    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"--init-from {origin}: {_no_run(workdir, origin)}")
    ours = {_PARAMS + name: leaf for name, leaf in named_leaves(setup.state.params).items()}

    def agreeing(info: Info) -> dict[str, Any]:
        taken = {n: leaf for n, leaf in ours.items() if info.arrays.get(n) == dtype_and_shape(leaf)}
        if not taken:
            raise UserError(
                f"--init-from {origin}: no parameter of its checkpoint {info.step} has the name "
                "and shape of one of this model",
                *_unlike(ours, info.arrays)[:20],
            )
        return nested(taken)

    restored, info = Reader(workdir / "checkpoints").restore(None, agreeing, partial=True)
    found = named_leaves(restored)
    state = fresh_state(setup.config, setup.state)
    drawn, treedef = jax.tree.flatten(state.params)
    params = treedef.unflatten(
        found.get(name, leaf) for name, leaf in zip(ours, drawn, strict=True)
    )
    unused = sorted(name for name in info.arrays.keys() - ours.keys() if name.startswith(_PARAMS))
    say(f"{len(found)} of {len(ours)} parameters from checkpoint {info.step} of {origin}")
    for line in _unlike(ours, info.arrays):
        say(f"freshly initialised: {line}")
    for name in unused:
        say(f"not used: {_shown(name)}: {info.arrays[name]} there, absent here")
    there, here = info.position.tokenizer_hash, setup.mixture.tokenizer_hash
    if there not in (None, here):
        say(f"trained with tokenizer {there} there, {here} here")
    record = {
        "from": str(workdir),
        "checkpoint": info.step,
        "taken": len(found),
        "fresh": [_shown(name) for name in ours if name not in found],
        "unused": [_shown(name) for name in unused],
    }
    return state._replace(params=params), record


def require_origin(
    workdir: AnyPath, position: Position, init_from: str, say: Callable[[str], None]
) -> None:
    """Report that a run that resumes from `position` does not read `init_from` again.

    Raises:
      UserError: the run did not begin with it.
    """
    began = position.initialised_from
    if began == "":  # older runs did not record it: take the user's word
        began = init_from
    if began is None or _real(began) != _real(init_from):
        raise UserError(
            f"--init-from {init_from}: the run in {workdir} has a checkpoint and resumes from it; "
            f"it began with {'fresh parameters' if began is None else began}; leave --init-from "
            "out, or use another --workdir"
        )
    say(f"the run in {workdir} resumes; --init-from {init_from} is not read again")


def require_same_start(workdir: AnyPath, init_from: str | None) -> None:
    """Check that a run without a checkpoint is restarted with the same --init-from.

    Raises:
      UserError: it began with the parameters of another run.
    """
    events = (line for line in metrics_so_far(workdir) if line.get("event") == "initialised")
    origins = [event["from"] for event in events]
    if origins and (init_from is None or _real(init_from) != _real(origins[-1])):
        raise UserError(
            f"{workdir}: the run was begun with --init-from {origins[-1]} and has no checkpoint "
            "yet; give that again, or use another --workdir"
        )


def _real(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _no_run(path: AnyPath, given: str) -> str:
    """Return why `path` (`given` by the user) is not a run's directory."""
    if not path.exists():
        return "no such directory"
    if (path / EXPORTED).exists():
        return (
            "holds an export, not a run; make a run of it with "
            f"`cem import --input {given} --workdir RUN`, and start from that"
        )
    for folder in path.parents[:2]:
        if (folder / "checkpoints").is_dir():
            return f"not a run, but a part of one; name the run's directory, {folder}"
    return "not the directory of a run: it has no checkpoints/"


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, str]) -> list[str]:
    """Return a line per parameter of ours that theirs lack or have in another dtype or shape."""
    return [
        f"{_shown(name)}: {theirs.get(name, 'absent')} there, {dtype_and_shape(leaf)} here"
        for name, leaf in ours.items()
        if theirs.get(name) != dtype_and_shape(leaf)
    ]


def _shown(name: str) -> str:
    return name.removeprefix(_PARAMS)
