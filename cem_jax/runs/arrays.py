"""A training state as named arrays, written and read by Orbax.

`{"params": {"head": w}, "optimizer": (ScaleByAdamState(mu=…), …)}` has the leaves `params/head`,
`optimizer/0/mu/…`: dict keys and field names as they are, other tuples and lists by index. So what
is stored does not depend on Python classes.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from cem_jax.storage.paths import AnyPath

_SHOWN = 20  # mismatches listed one by one
NICENESS = 15  # at 10 a step still takes 1.3 times as long; at 19 a busy machine would stop a save


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of `tree` by name, in order. Raises ValueError if two share a name."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same name")
    return named


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return named leaves as nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def dtype_and_shape(leaf: Any) -> str:
    """Format dtype and shape: `float32[4, 8]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def mismatches(saved: Mapping[str, str], abstract: Any, partial: bool) -> list[str]:
    """Return a line per array whose dtype and shape in `saved` differ from `abstract`'s leaf.

    `partial`: ignore arrays that only `saved` has.
    """
    ours = {name: dtype_and_shape(leaf) for name, leaf in named_leaves(abstract).items()}
    lines = [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} here"
        for name in sorted(ours if partial else ours.keys() | saved.keys())
        if ours.get(name) != saved.get(name)
    ]
    hidden = len(lines) - _SHOWN
    return lines if hidden <= 0 else [*lines[:_SHOWN], f"… and {hidden} more"]


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """Return the leaves of `state` by name, each as an array of its own dtype.

    Raises ValueError if JAX would narrow one.
    """
    return {name: _as_array(name, leaf) for name, leaf in named_leaves(state).items()}


def _as_array(name: str, leaf: Any) -> jax.Array:
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and array.dtype != leaf.dtype:
        raise ValueError(f"{name}: JAX has no {leaf.dtype} while 64-bit types are off")
    return array


def to_write(arrays: Mapping[str, jax.Array]) -> ocp.args.PyTreeSave:
    """Return Orbax's arguments to save `arrays`."""
    # Orbax refuses empty arrays; their dtypes and shapes, stored in `Info`, are enough.
    return ocp.args.PyTreeSave(nested({n: array for n, array in arrays.items() if array.size}))


def read_arrays(checkpoint: AnyPath, abstract: Any) -> Any:
    """Read the arrays that `abstract` names from the directory `checkpoint`, in its structure.

    Each is placed by its leaf's sharding, or on the first local device if it has none.
    """
    leaves = {name: _placed(leaf) for name, leaf in named_leaves(abstract).items()}
    wanted = nested({name: leaf for name, leaf in leaves.items() if leaf.size})
    arguments = ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    # A checkpointer would ask object stores for Orbax's own marker, which copies may lack.
    reader = ocp.CompositeCheckpointHandler()
    restored = reader.restore(epath.Path(str(checkpoint)), ocp.args.Composite(state=arguments))
    reader.close()
    arrays = named_leaves(restored["state"])
    for name, leaf in leaves.items():
        if not leaf.size:
            arrays[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves])


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@contextlib.contextmanager
def low_priority_threads() -> Iterator[None]:
    """Give threads started inside, and their children, only idle processor time (Linux only).

    At normal priority, threads that compress arrays on the same cores slow a step by half without
    finishing sooner.
    """
    before = _threads()
    try:
        yield
    finally:
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _threads() -> set[int]:
    """Return the kernel's ids of this process's threads."""
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return set()


def one_line(error: BaseException) -> str:
    """Return an error of Orbax or TensorStore as one line, led by the operating system's reason."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)  # TensorStore puts the reason last
    reason = "" if code is None else f"{os.strerror(int(code[1]))}: "
    return reason + (text if len(text) <= 300 else f"{text[:120]} … {text[-175:]}")


def report_failures_once() -> None:
    """Silence Orbax's logging of failures that it also raises; may be called repeatedly."""
    logging.getLogger("absl").addFilter(_RAISED_ANYWAY)
    if sys.unraisablehook is not _without_closed_loops:
        _previous_hook.append(sys.unraisablehook)
        sys.unraisablehook = _without_closed_loops


class _RaisedAnyway(logging.Filter):
    """Drops Orbax's log records, with tracebacks, of failures that it also raises to us."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "/orbax/" in record.pathname)


_RAISED_ANYWAY = _RaisedAnyway()
_previous_hook = []


def _without_closed_loops(unraisable) -> None:
    # After one write of a save fails, Orbax closes the event loop, and TensorStore reports every
    # other write whose result it cannot deliver there.
    if str(unraisable.exc_value) != "Event loop is closed":
        _previous_hook[-1](unraisable)
