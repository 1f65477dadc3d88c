"""`cem train --init-from RUN`: a new run that begins with the parameters of another one."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from cem_jax.errors import UserError
from cem_jax.runs.checkpoint import Checkpointer
from cem_jax.runs.directory import EXPORTED
from cem_jax.runs.metrics import metrics_so_far
from cem_jax.runs.tree_names import describe, named_leaves, nested
from cem_jax.storage.paths import place
from cem_jax.storage.remote import is_url
from cem_jax.train.setup import Setup, fresh_state
from cem_jax.train.step import TrainState

ORIGIN = "initialised_from"  # in a checkpoint's extra: the run it began with, or None
_PARAMS = "params/"


def initialised_from(
    setup: Setup, origin: str, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]]:
    """Step 0 with the parameters of the run `origin`, where names, shapes and dtypes agree.

    The rest stays as freshly drawn; `say` is told what. Returns the state, and what is worth
    recording: {from, checkpoint, taken, fresh, unused}.

    Raises:
      UserError: `origin` has no sound checkpoint, or not one parameter agrees.
    """
    workdir = place(origin)
    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"--init-from {origin}: {_no_run(workdir, origin)}")
    ours = {_PARAMS + name: leaf for name, leaf in named_leaves(setup.state.params).items()}
    with Checkpointer(workdir / "checkpoints", keep=1, keep_best=False) as checkpoints:
        step = checkpoints.newest_sound()
        info = checkpoints.describe(step)
        theirs = {n: text for n, text in info["arrays"].items() if n.startswith(_PARAMS)}
        taken = {name: leaf for name, leaf in ours.items() if theirs.get(name) == describe(leaf)}
        if not taken:
            raise UserError(
                f"--init-from {origin}: no parameter of its checkpoint {step} has the name and "
                "shape of one of this model",
                *_unlike(ours, theirs)[:20],
            )
        restored, extra, _ = checkpoints.restore(step, nested(taken), partial=True)
    found = named_leaves(restored)
    state = fresh_state(setup)
    paths, treedef = jax.tree.flatten(state.params)
    params = treedef.unflatten(
        found.get(name, leaf) for name, leaf in zip(ours, paths, strict=True)
    )
    fresh, unused = _unlike(ours, theirs), sorted(theirs.keys() - ours.keys())
    say(f"{len(taken)} of {len(ours)} parameters from checkpoint {step} of {origin}")
    for line in fresh:
        say(f"as freshly drawn: {line}")
    for name in unused:
        say(f"not used: {_shown(name)}: {theirs[name]} there, absent here")
    hashes = extra.get("tokenizer_hash"), setup.mixture.tokenizer_hash
    if hashes[0] not in (None, hashes[1]):
        say(f"trained with tokenizer {hashes[0]} there, {hashes[1]} here")
    record = {
        "from": str(workdir),
        "checkpoint": step,
        "taken": len(taken),
        "fresh": [_shown(name) for name in ours if name not in taken],
        "unused": [_shown(name) for name in unused],
    }
    return state._replace(params=params), record


def require_origin(
    workdir: epath.Path, extra: Mapping[str, Any], init_from: str, say: Callable[[str], None]
) -> None:
    """Of a run that goes on: says that `init_from` is not read again.

    Raises:
      UserError: it is not what the run, whose checkpoint holds `extra`, began with.
    """
    began = extra.get(ORIGIN, init_from)  # runs that began before it was recorded are believed
    if began is None or _real(began) != _real(init_from):
        raise UserError(
            f"--init-from {init_from}: the run in {workdir} has a checkpoint and goes on from it; "
            f"it began with {'fresh parameters' if began is None else began}; leave --init-from "
            "out, or use another --workdir"
        )
    say(f"the run in {workdir} goes on; --init-from {init_from} is not read again")


def require_same_start(workdir: epath.Path, init_from: str | None) -> None:
    """Of a run without a checkpoint that is begun again.

    Raises:
      UserError: it was begun with the parameters of another run than `init_from`.
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


def _no_run(path: epath.Path, given: str) -> str:
    """What there is in place of a run's directory, which was `given` as this."""
    if not path.exists():
        return "no such directory"
    if (path / EXPORTED).exists():
        return (
            "holds what `cem export` wrote, not a run; make one of it by "
            f"`cem import --input {given} --workdir RUN`, and begin with that"
        )
    for folder in path.parents[:2]:
        if (folder / "checkpoints").is_dir():
            return f"not a run, but a part of one; name the run's directory, {folder}"
    return "not the directory of a run: there is no checkpoints/ in it"


def _unlike(ours: dict[str, Any], theirs: dict[str, str]) -> list[str]:
    """A line for each parameter of ours that theirs has not, or not so."""
    return [
        f"{_shown(name)}: {theirs.get(name, 'absent')} there, {describe(leaf)} here"
        for name, leaf in ours.items()
        if theirs.get(name) != describe(leaf)
    ]


def _shown(name: str) -> str:
    return name.removeprefix(_PARAMS)
