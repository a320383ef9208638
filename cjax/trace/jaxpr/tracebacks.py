"""Who wrote an equation: the place in the user's code, and whether a module's method or the loss around it did.

Name stacks say it for Linen alone. A traceback says it for both, as far out as the function that was traced: that of an
equation within a jitted function (which most of `jax.numpy` is) ends there, and its caller's goes on.
"""

import functools
import linecache
from pathlib import Path
from types import CodeType

import jax
from flax import linen as nn
from flax import nnx

from cjax.jax_compat.jaxprs import codes, frames

_JAX = str(Path(jax.__file__).parent)
_LOSS = "loss_caller.<locals>.call"  # of cjax.trace.author.loss: what is further out is no part of the user's loss
_SHOWN = 80  # characters of a line of code


def is_jax_alone(traceback: object | None) -> bool:
    """Whether no line of a traceback is the user's, or another library's."""
    return traceback is None or all(code.co_filename.startswith(_JAX) for code in codes(traceback))


def in_model(traceback: object | None) -> bool:
    """Whether a method of a Flax module was running, called by the loss."""
    if traceback is None:
        return False
    for code in codes(traceback):
        if code.co_qualname == _LOSS:
            return False
        if _is_method(code):
            return True
    return False


def called_by_loss(traceback: object | None) -> bool:
    """Whether the method that was running is of the module that the loss called, with no other module's between."""
    owners = []
    for code in () if traceback is None else codes(traceback):
        if code.co_qualname == _LOSS:
            break
        if (owner := _owner(code)) and owner not in (nn.Module, nnx.Module):  # through which Linen calls every method
            owners.append(owner)
    return bool(owners) and all(issubclass(owners[-1], one) or issubclass(one, owners[-1]) for one in owners)


def _is_method(code: CodeType) -> bool:
    """Whether a function that runs is a method of a module, or was made in one."""
    return _owner(code) is not None


@functools.lru_cache(maxsize=10_000)
def _owner(code: CodeType) -> type | None:
    """The class of modules whose method a function is, or was made in; one of those that have this name."""
    *owner, _ = code.co_qualname.split(".")
    if not owner:
        return None
    named: dict[str, type] = {}
    left: list[type] = [nn.Module, nnx.Module]
    while left:
        cls = left.pop()
        named.setdefault(cls.__qualname__, cls)
        left += cls.__subclasses__()
    found = (named.get(".".join(owner[: i + 1])) for i in range(len(owner)))
    return next((cls for cls in found if cls is not None), None)


def place(traceback: object | None) -> str:
    """Who wrote an equation without a name stack, as NNX's are: the innermost module called, or the line of code."""
    told = [] if traceback is None else frames(traceback)
    told = [frame for frame in told if not Path(frame.file_name).is_relative_to(_JAX)]
    for frame in told:
        if frame.function_name == _LOSS:
            break
        *owner, method = frame.function_name.split(".")
        if method == "__call__" and owner:
            return owner[-1]
    if not told:
        return "the loss"
    file, line = told[0].file_name, told[0].line_num
    code = linecache.getline(file, line).strip()
    shown = code if len(code) <= _SHOWN else f"{code[:_SHOWN]}..."
    return f"{Path(file).name}:{line}" + (f" `{shown}`" if shown else "")
