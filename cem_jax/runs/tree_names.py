"""A training state as names: what is stored does not depend on Python classes.

`{"params": {"head": w}, "optimizer": (ScaleByAdamState(mu=…), …)}` has the leaves `params/head`,
`optimizer/0/mu/…`: dict keys and field names as they are, other tuples and lists by index.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

_SHOWN = 20  # differences listed one by one


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by name, in its order. Raises ValueError where two share a name."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same name")
    return named


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """Named leaves as dicts within dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def as_array(name: str, leaf: Any) -> jax.Array:
    """`leaf` as an array of its own dtype. Raises ValueError where JAX would narrow it."""
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and array.dtype != leaf.dtype:
        raise ValueError(f"{name}: JAX has no {leaf.dtype} while 64-bit types are off")
    return array


def placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract value of `leaf` with its sharding; on the first local device without one."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def describe(leaf: Any) -> str:
    """Dtype and shape as text: `float32[4, 8]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def differences(saved: Mapping[str, str], abstract: Any, partial: bool) -> list[str]:
    """One line for each array whose description in `saved` is not that of `abstract`'s leaf.

    `partial`: arrays that only `saved` has are no difference.
    """
    ours = {name: describe(leaf) for name, leaf in named_leaves(abstract).items()}
    lines = [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} here"
        for name in sorted(ours if partial else ours.keys() | saved.keys())
        if ours.get(name) != saved.get(name)
    ]
    hidden = len(lines) - _SHOWN
    return lines if hidden <= 0 else [*lines[:_SHOWN], f"… and {hidden} more"]
