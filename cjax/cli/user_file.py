"""`file.py:function`: the user's own model, as a command is given it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def user_parts(text: str) -> tuple[Any, Any, Any, Any]:
    """What the function returns: (model, loss, optimizer, batch).

    Args:
        text: the path of a Python file, a colon, and the name of a function without arguments.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such function in it, or one that returns something else.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    # Where Python would look for what the file imports, were it run as a script.
    sys.path.insert(0, str(path.parent.absolute()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name}")
    parts = function()
    if not isinstance(parts, tuple) or len(parts) != 4:
        what = f"a {type(parts).__name__}" + (f" of {len(parts)}" if isinstance(parts, tuple) else "")
        raise ValueError(f"{text} returned {what}; it should return (model, loss, optimizer, batch)")
    return parts
