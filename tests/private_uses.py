"""What JAX and Flax promise to nobody is used in one room, `cjax/jax_compat`: the rule, as in `architecture.py`."""

import ast
import functools
from collections.abc import Iterator

from architecture import Tree, dotted, house, imported_names, nodes, room_of

ROOM = "jax_compat"
# Of these `jax.extend.core` is not.
PRIVATE_MODULES = ("jaxlib", "jax.interpreters", "jax.extend", "jax.experimental.compilation_cache")
PUBLIC_MODULES = ("jax.extend.core",)
# Names of fields, methods and parameters that JAX documents of no class; the house calls nothing of its own so.
PRIVATE_NAMES = {
    "call_wrapped", "client", "ctx", "debug_info", "f_transformed", "ft_in", "ft_out", "raw_frames", "runtime_type",
    "source_info", "transforms",
}  # fmt: skip
PRIVATE_TEXT = ("jax._src", "key<fry>")
PRIVATE_CONSTRUCTORS = {"Var", "Literal", "JaxprEqn", "new_jaxpr_eqn", "wrap_init", "WrappedFun"}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}
PATCHED = ("jax", "flax", "optax", "orbax")  # whose classes nobody changes


def private_jax_is_in_one_room(tree: Tree) -> list[str]:
    """Each such use is a function of `cjax/jax_compat`, with a test that a new JAX has to pass."""
    paths = [path for path in house(tree) if room_of(path) != ROOM]
    own: dict[str, frozenset[str]] = {}
    for path in paths:
        own[room_of(path)] = own.get(room_of(path), frozenset()) | _own_names(tree[path])
    return [
        f"{path}:{line} uses {name}" for path in paths for line, name in _uses(path, tree[path], own[room_of(path)])
    ]


@functools.cache
def _own_names(text: str) -> frozenset[str]:
    """Names with an underscore in front that a file itself gives to functions, classes and fields."""
    found: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            found.add(node.attr)
    return frozenset(name for name in found if name.startswith("_"))


@functools.cache
def _uses(path: str, text: str, own: frozenset[str]) -> list[tuple[int, str]]:
    """Lines that touch what JAX and Flax keep to themselves, and what they touch."""
    docstrings = {
        id(node.value) for node in nodes(text) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    foreign: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in nodes(text):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported_names(node, path)
            found += [(node.lineno, name) for name in names if _is_private_module(name)]
            for alias, name in zip(node.names, names, strict=True):
                foreign[alias.asname or alias.name.split(".")[0]] = name
        elif id(node) not in docstrings:
            found += [(getattr(node, "lineno", 0), name) for name in _private_names(node, own)]
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if foreign.get(dotted(node).split(".")[0], "").split(".")[0] in PATCHED:
                found.append((node.lineno, dotted(node)))
    return sorted(found)


def _is_private_module(name: str) -> bool:
    if name.split(".")[0] == "cjax" or any(f"{name}.".startswith(f"{module}.") for module in PUBLIC_MODULES):
        return False
    has_underscore = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return has_underscore or any(f"{name}.".startswith(f"{module}.") for module in PRIVATE_MODULES)


def _private_names(node: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """What a node itself names that is private to somebody else; `own` are its room's names with an underscore."""
    match node:
        case ast.Attribute(attr=name):
            is_own = name in own or name.startswith("__") or name in OF_NAMED_TUPLES or dotted(node) == "os._exit"
            if name in PRIVATE_NAMES or (name.startswith("_") and not is_own):
                yield name
        case ast.keyword(arg=str(name)) if name in PRIVATE_NAMES:
            yield name
        case ast.Constant(value=str(text)) if text in PRIVATE_NAMES or any(part in text for part in PRIVATE_TEXT):
            yield text
        case ast.Call(func=function) if dotted(function).rpartition(".")[2] in PRIVATE_CONSTRUCTORS:
            yield dotted(function)
