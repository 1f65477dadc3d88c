"""Run a configuration file, `file.py` or `file.py:argument`."""

import contextlib
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_collections

from cem_jax.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[2]

# The kinds of files, by the function they define, and the commands that take them.
_KINDS = {
    "get_config": "a model, for `cem train`, `cem verify`, `cem inspect` and `cem compile`",
    "get_sweep": "a figure, for `cem sweep` and `cem report`",
}


def read_config_file(path: str) -> dict[str, Any]:
    """Return the result of the file's `get_config()` as nested dicts.

    Raises UserError as `call_in_file` does, and when the result is not a ConfigDict.
    """

    def as_dict(config: Any) -> dict[str, Any]:
        if not isinstance(config, ml_collections.ConfigDict):
            raise UserError(
                f"{split_argument(path)[0]}: get_config() must return an "
                f"ml_collections.ConfigDict, not {type(config).__name__}"
            )
        return config.to_dict()

    return call_in_file(path, "get_config", as_dict)


def call_in_file(path: str, function: str, use: Callable[[Any], Any]) -> Any:
    """Call `function()` in `file.py`, or `function(argument)` in `file.py:argument`.

    Returns `use(result)`, whose errors count as the file's. The file may import its neighbours by
    name, and the shipped configurations as `from configs import base`, from any working directory.
    Raises UserError when the file is missing, fails, or has no such function; it names the file,
    the line if possible, and the commands that take a file of the other kind.
    """
    file, argument = split_argument(path)
    if file.is_dir():
        raise UserError(f"{file}: is a directory, not a Python file")
    if file.suffix != ".py":
        raise UserError(f"{file}: not a Python file: its name should end in .py")
    try:
        source = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    with _importable(file.resolve().parent):
        try:
            return use(_run(file, source, function, argument))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(_located(error, file)) from None


def split_argument(path: str) -> tuple[Path, list[str]]:
    """Split `file.py:argument` into (file.py, [argument]); without an argument, (path, [])."""
    path = os.path.expanduser(path)
    if not Path(path).exists() and ".py:" in path:
        stem, _, argument = path.partition(".py:")
        return Path(stem + ".py"), [argument]
    return Path(path), []


def _run(file: Path, source: bytes, function: str, argument: list[str]) -> Any:
    module = types.ModuleType("cem_jax_user_config")
    module.__file__ = str(file)
    exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    call = getattr(module, function, None)
    if not callable(call):
        raise UserError(f"{file}: defines no function {function}(){_other_kind(module)}")
    try:
        inspect.signature(call).bind(*argument)
    except TypeError:
        if argument:
            raise UserError(
                f"{file}: {function}() takes no argument, but {argument[0]!r} was given"
            ) from None
        raise UserError(f"{file}: {function}() needs an argument: {file}:ARGUMENT") from None
    return call(*argument)


def _other_kind(module: types.ModuleType) -> str:
    """Describe the file if it is of another kind than the command takes."""
    return "".join(
        f", but {name}(): it describes {kind}"
        for name, kind in _KINDS.items()
        if callable(getattr(module, name, None))
    )


def _located(error: BaseException, file: Path) -> str:
    """Return `file:line: error`, with the last line of the user's own code in the traceback."""
    what = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{file}:{lines[-1]}: {what}" if lines else f"{file}: {what}"


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let code in `folder` import its neighbours and `configs`, and forget them afterwards.

    `configs` is a namespace package made of every folder of that name above the file and the one
    beside the installed package.
    """
    above = [f for f in (folder, *folder.parents, _CHECKOUT) if (f / "configs").is_dir()]
    path_before, modules_before = list(sys.path), dict(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        del sys.modules[name]
    sys.path[:0] = dict.fromkeys(map(str, (folder, *above)))
    importlib.invalidate_caches()  # the files may be newer than the finder's listing
    try:
        yield
    finally:
        sys.path[:] = path_before
        for name, module in list(sys.modules.items()):
            if name not in modules_before and _belongs(name, module, folder):
                del sys.modules[name]
        sys.modules.update({n: m for n, m in modules_before.items() if n not in sys.modules})


def _belongs(name: str, module: Any, folder: Path) -> bool:
    origin = getattr(module, "__file__", None)
    beside = origin is not None and Path(origin).parent == folder
    return beside or name.partition(".")[0] == "configs"
