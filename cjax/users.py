"""The user's own `file.py:function`: an error in it is shown with its file and line."""

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cjax.tree import kind_of

R = TypeVar("R")


class UsersError(RuntimeError):
    """What the user's own code raised; the text names its lines."""


def user_parts(text: str) -> tuple[Any, Any, Any, Any]:
    """What the function `file.py:function` returns: (model, loss, optimizer, batch).

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such function in it, or one that returns something else.
        UsersError: it raises.
    """
    file, _, name = text.rpartition(":")
    parts = with_lines(Path(file), load_users(Path(file), name))
    if not isinstance(parts, tuple) or len(parts) != 4:
        what = kind_of(parts) + (f" of {len(parts)}" if isinstance(parts, tuple) else "")
        raise ValueError(f"{text} returned {what}; it should return (model, loss, optimizer, batch)")
    return parts


def load_users(path: Path, name: str) -> Callable[[], Any]:
    """The function `name` of the file `path`.

    Raises:
        FileNotFoundError: no such Python file.
        ValueError: it has no such function.
        UsersError: the file raises as it is imported.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    # Where Python would look for what the file imports, were it run as a script.
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[path.stem] = module
    loader = spec.loader
    with_lines(path, lambda: loader.exec_module(module))
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name}")
    return function


def with_lines(path: Path, call: Callable[[], R]) -> R:
    """What `call` returns.

    Raises:
        UsersError: it raised in the user's file, or in what that imports from beside it: those lines of the traceback,
            without JAX's and ours. What was raised elsewhere is raised as it is.
    """
    try:
        return call()
    except Exception as error:
        folder = path.parent.resolve()
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_in(frame.filename, folder)]
        if not lines and not isinstance(error, SyntaxError):
            raise
        notes = [note for note in getattr(error, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in note]
        error.__notes__ = notes
        text = "".join([*traceback.format_list(lines), *traceback.format_exception_only(error)]).rstrip()
        raise UsersError(f"an error in {path}:\n{text}") from error


def _is_in(file: str, folder: Path) -> bool:
    place = Path(file).resolve()
    others = Path(__file__).parent.parent, Path(sysconfig.get_path("stdlib")).resolve()  # cjax's and Python's own
    if not place.is_relative_to(folder) or any(place.is_relative_to(other) for other in others):
        return False
    return "site-packages" not in place.relative_to(folder).parts
