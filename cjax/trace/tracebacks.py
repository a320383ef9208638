"""Who wrote an equation: the place in the user's code, and whether a module's method or the loss around it did.

Name stacks say it for Linen alone. A traceback says it for both, but JAX keeps the traces of jitted functions (which
most of `jax.numpy` is) and hands them out again elsewhere: their tracebacks are of whoever came first.
"""

from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

_JAX = str(Path(jax.__file__).parent)
_LOSS = "loss_caller.<locals>.call"  # of cjax.trace.loss: what is further out is no part of the user's loss


def is_fresh(call: Any, body: Any) -> bool:
    """Whether the equations of `body`, which the equation `call` calls, were traced by this very line of code."""
    first = next((eqn.source_info.traceback for eqn in body.eqns if eqn.source_info.traceback is not None), None)
    if first is None or call.source_info.traceback is None:
        return False
    outer, inner = _user_frames(call.source_info.traceback), _user_frames(first)
    return len(outer) <= len(inner) and inner[len(inner) - len(outer) :] == outer


def _user_frames(traceback: Any) -> list[tuple[Any, int]]:
    codes, lines = traceback.raw_frames()
    return [(c, line) for c, line in zip(codes, lines, strict=True) if not c.co_filename.startswith(_JAX)]


def in_model(traceback: Any) -> bool:
    """Whether a method of a Flax module was running, called by the loss."""
    if traceback is None:
        return False
    modules = _module_names()
    for code in traceback.raw_frames()[0]:
        if code.co_qualname == _LOSS:
            return False
        *owner, _ = code.co_qualname.split(".")
        if any(".".join(owner[: i + 1]) in modules for i in range(len(owner))):
            return True
    return False


def _module_names() -> set[str]:
    """The names of all classes of modules that there are now; the user may write more at any time."""
    names, left = set(), [nn.Module, nnx.Module]
    while left:
        cls = left.pop()
        names.add(cls.__qualname__)
        left += cls.__subclasses__()
    return names


def place(traceback: Any) -> str:
    """Who wrote an equation without a name stack, as NNX's are: the innermost module called, or the line of code."""
    frames = [] if traceback is None else list(traceback.frames)
    frames = [frame for frame in frames if not Path(frame.file_name).is_relative_to(_JAX)]
    for frame in frames:
        if frame.function_name == _LOSS:
            break
        *owner, method = frame.function_name.split(".")
        if method == "__call__" and owner:
            return owner[-1]
    return f"{Path(frames[0].file_name).name}:{frames[0].line_num}" if frames else "the loss"
