"""Who may look at whom, and how large a room may grow: the house's rules, read off the syntax trees."""

import ast
import os
import statistics
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "cjax"

# Lowest first. A room may import rooms of its own floor (as long as no cycle comes of it) and of the floors below.
FLOORS = (
    ("jax_compat", "tree", "cards", "plan"),
    ("mesh",),
    ("trace",),
    ("sharding", "pipeline"),
    ("planner",),
    ("gradients",),
    ("audit", "report", "checkpoint"),
    ("program",),
    ("parallelize",),
    ("data",),
    ("train", "generate"),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The same within a room: its folders, lowest first; "" is what stands in the room itself.
SUBROOMS = {
    "trace": (("jaxpr",), ("author",), ("dims", "layers"), ("emit",), ("examples",), ("",),
              ("attention", "stages", "microbatches")),
    "sharding": (("storage",), ("products",), ("layout", "attention"), ("apart",), ("place",)),
    "models": (("",), ("transformers",)),
    "data": (("",), ("text", "images"), ("tasks",)),
}  # fmt: skip
SUBFLOOR_OF = {
    (room, folder): floor for room, floors in SUBROOMS.items() for floor, names in enumerate(floors) for folder in names
}
LEAVES = ("jax_compat", "tree", "cards", "models/past")  # import nothing of the house
# Stand beside the house: import nothing of it, may be imported by its top floors.
BESIDE = ("models", "optim", "attention")
# Never import each other in either direction.
STRANGERS = ({"sharding", "pipeline"}, {"trace", "mesh"}, {"trace", "plan"})
FRONT_DOORS = ("__init__", "__main__")
# The one room that may use what JAX and Flax promise to nobody. `jax.extend.core` is not of that.
PRIVATE_ROOM = "jax_compat"
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

# Annotations that say nothing, by file, in a room whose every function reads what another makes. May only shrink.
TYPED_ROOM = "trace"
UNTYPED = {
    "cjax/trace/attention/walk.py": 1,  # what is found on the way: variables, labels and equations by name
    "cjax/trace/author/loss.py": 3,  # the user's model, and what the user puts in a Mean
    "cjax/trace/dims/rules.py": 1,  # rules by primitive: some are asked before dims are known, and some behind
    "cjax/trace/emit/emit.py": 1,  # bodies of loops, each with operands of its own
    "cjax/trace/examples/values.py": 2,  # fields of a value, by name
    "cjax/trace/jaxpr/identity.py": 1,  # a function, or what JAX wraps one in, which is not callable
    "cjax/trace/jaxpr/primitives.py": 1,  # fields of facts, by name
}

MAX_FILE_LINES = 500
MAX_MEDIAN_FILE_LINES = 200
MAX_FUNCTION_LINES = 60
MAX_SHARE_OF_LONG_FUNCTIONS = 0.10

FILES = sorted(HOUSE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def room_of(module: str) -> str:
    """`cjax.trace.dims.find` lives in `trace`; the package itself is its front door, `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def folder_of(module: str) -> str:
    """`cjax.trace.dims.find` lives in the folder `dims` of its room; what stands in a room itself, in ""."""
    path = MODULES.get(module)
    parts = path.relative_to(HOUSE).parts[:-1] if path else ()
    return parts[1] if len(parts) > 1 else ""


def imported_names(node: ast.stmt, importer: Path) -> list[str]:
    """Full dotted names of the modules (or of names inside them) that one import statement asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = importer.relative_to(ROOT).parent.parts
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def to_module(name: str) -> str:
    """The module of cjax a dotted name lives in: `cjax.plan.Plan` -> `cjax.plan`."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def house_imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Each import of a cjax module in `path`: line, module, and whether it hides inside a function."""

    def visit(node: ast.AST, inside_function: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for name in imported_names(child, path):
                    if name.split(".")[0] == "cjax":
                        yield child.lineno, to_module(name), inside_function
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, inside_function or is_function)

    yield from visit(ast.parse(path.read_text()), False)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def import_graph() -> dict[str, set[str]]:
    return {module: {target for _, target, _ in house_imports(path)} - {module} for module, path in MODULES.items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One loop of imports, or nothing."""
    done: set[str] = set()

    def descend(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := descend(target, [*trail, module]):
                return cycle
        done.add(module)
        return []

    for module in sorted(graph):
        if cycle := descend(module, []):
            return cycle
    return []


def may_import_within(room: str, importer: str, imported: str) -> bool:
    """Whether a module of folder `importer` of a room may import one of folder `imported`."""
    if room not in SUBROOMS or importer == imported:
        return True
    for folder in (importer, imported):
        assert (room, folder) in SUBFLOOR_OF, f"the design has no folder {folder!r} in {room}"
    return SUBFLOOR_OF[room, importer] > SUBFLOOR_OF[room, imported]


def may_import(importer: str, imported: str) -> bool:
    """Whether a module of room `importer` may import a module of room `imported`."""
    if importer in FRONT_DOORS or importer == imported:
        return True
    if imported in FRONT_DOORS or importer in BESIDE or {importer, imported} in STRANGERS:
        return False
    assert importer in FLOOR_OF, f"the design has no room {importer!r}"
    if imported in BESIDE:
        return FLOOR_OF[importer] >= FLOOR_OF["program" if imported == "optim" else "parallelize"]
    assert imported in FLOOR_OF, f"the design has no room {imported!r}"
    return FLOOR_OF[importer] >= FLOOR_OF[imported]


def test_the_rules_themselves() -> None:
    """Planted faults: each is what the rules exist to refuse."""
    assert may_import("program", "plan") and not may_import("plan", "program")
    assert not may_import("sharding", "pipeline") and not may_import("pipeline", "sharding")
    assert not may_import("models", "plan") and not may_import("optim", "models") and not may_import("trace", "models")
    assert not may_import("mesh", "__init__") and may_import("cli", "models")
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert may_import_within("trace", "attention", "jaxpr") and not may_import_within("trace", "jaxpr", "attention")
    assert may_import_within("trace", "", "dims") and not may_import_within("trace", "dims", "")
    assert not may_import_within("trace", "stages", "attention") and may_import_within("trace", "dims", "dims")
    with pytest.raises(AssertionError, match="no folder 'drawer'"):
        may_import_within("trace", "drawer", "dims")
    assert not may_import("trace", "mesh"), "what a model is depends on no mesh"
    inside = ast.parse("from ..trace import dims\nfrom . import layout\nimport cjax.plan").body
    names = [name for node in inside for name in imported_names(node, HOUSE / "sharding" / "place.py")]
    assert names == ["cjax.trace.dims", "cjax.sharding.layout", "cjax.plan"]


def test_rooms_are_those_of_the_design() -> None:
    rooms = {path.relative_to(HOUSE).parts[0].removesuffix(".py") for path in FILES}
    unknown = rooms - set(FLOOR_OF) - set(BESIDE) - set(FRONT_DOORS)
    assert not unknown, f"rooms that the design does not have: {sorted(unknown)}; see docs/design.md"


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_are_leaves(leaf: str) -> None:
    files = [path for path in FILES if path == HOUSE / f"{leaf}.py" or path.is_relative_to(HOUSE / leaf)]
    assert files and not [(path.name, target) for path in files for _, target, _ in house_imports(path)]


def test_no_folder_is_forgotten() -> None:
    folders = {(room_of(module), folder_of(module)) for module in MODULES}
    known = {room: {folder for floor in floors for folder in floor} for room, floors in SUBROOMS.items()}
    assert not {(room, folder) for room, folder in folders if folder and folder not in known.get(room, set())}
    empty = {(room, folder) for room, names in known.items() for folder in names} - folders
    assert not empty, f"folders of the design that are not there: {empty}"


def test_no_drawer() -> None:
    drawers = [str(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]
    assert not drawers, f"a drawer for everything is a room for nothing: {drawers}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    if path.name == "__init__.py" and folder_of(module):
        assert not list(house_imports(path)), f"{path} is the front of a folder, and has a sentence to say, no more"
    for line, target, inside_function in house_imports(path):
        where = f"{path.relative_to(ROOT)}:{line}"
        if room_of(module) == room_of(target) and path.name != "__init__.py":
            within = may_import_within(room_of(module), folder_of(module), folder_of(target))
            assert within, f"{where} imports {target}, whose folder is above or beside its own"
        assert may_import(room_of(module), room_of(target)), f"{where} imports {target}, which is above or beside it"
        assert not inside_function, f"{where} imports {target} inside a function: a dodged cycle, move the room instead"


def test_no_cycles() -> None:
    cycle = find_cycle(import_graph())
    assert not cycle, " -> ".join(cycle)


def imports_of_experiments(text: str, path: Path) -> list[int]:
    """Lines that import experiments, by their folder's name or as the modules that they are when they run."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    found = {node.lineno: imported_names(node, path) for node in statements}
    return [line for line, names in found.items() if any(name.split(".")[0] == "experiments" for name in names)]


def test_nobody_imports_experiments() -> None:
    planted = "import experiments\ndef f():\n    from experiments import training\n    import experiments.charts\n"
    assert imports_of_experiments(planted, HOUSE / "cards.py") == [1, 3, 4]
    for folder in ("cjax", "experiments", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = imports_of_experiments(path.read_text(), path)
            assert not lines, f"{path}:{lines}"


def dotted(node: ast.AST) -> str:
    """`nn.Module.sow` as text; "" for what is no such chain of names."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def own_private_names(text: str) -> set[str]:
    """Names with an underscore in front that the house itself gives to functions, classes and fields."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            found.add(node.attr)
    return {name for name in found if name.startswith("_")}


def is_private_import(name: str) -> bool:
    if name.split(".")[0] == "cjax" or any(f"{name}.".startswith(f"{module}.") for module in PUBLIC_MODULES):
        return False
    has_underscore = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    return has_underscore or any(f"{name}.".startswith(f"{module}.") for module in PRIVATE_MODULES)


def private_names(node: ast.AST, own: set[str]) -> Iterator[str]:
    """What a node itself names that is private to somebody else; `own` are the house's names with an underscore."""
    match node:
        case ast.Attribute(attr=name):
            is_own = name in own or name.startswith("__") or name in OF_NAMED_TUPLES
            if name in PRIVATE_NAMES or (name.startswith("_") and not is_own):
                yield name
        case ast.keyword(arg=str(name)) if name in PRIVATE_NAMES:
            yield name
        case ast.Constant(value=str(text)) if text in PRIVATE_NAMES or any(part in text for part in PRIVATE_TEXT):
            yield text
        case ast.Call(func=function) if dotted(function).rpartition(".")[2] in PRIVATE_CONSTRUCTORS:
            yield dotted(function)


def private_uses(text: str, path: Path, own: set[str]) -> list[tuple[int, str]]:
    """Lines that touch what JAX and Flax keep to themselves, and what they touch."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {
        id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    foreign: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported_names(node, path)
            found += [(node.lineno, name) for name in names if is_private_import(name)]
            for alias, name in zip(node.names, names, strict=True):
                foreign[alias.asname or alias.name.split(".")[0]] = name
        elif id(node) not in docstrings:
            found += [(getattr(node, "lineno", 0), name) for name in private_names(node, own)]
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if foreign.get(dotted(node).split(".")[0], "").split(".")[0] in PATCHED:
                found.append((node.lineno, dotted(node)))
    return sorted(found)


@pytest.mark.parametrize(
    "planted",
    [
        "from jax._src import core",
        "import jax._src.core",
        "from jaxlib import xla_client",
        "from jax.interpreters import partial_eval",
        "from jax.extend.random import threefry2x32_p",
        "import jax.extend.backend",
        "from flax.nnx import _private",
        "def f():\n    from jax import _src",
        "eqn.ctx",
        "eqn.replace(source_info=1)",
        "rule.call_wrapped()",
        "hasattr(value, 'transforms')",
        "eqn.params['ft_in']",
        "dtype.name == 'key<fry>'",
        "type(value).__module__.startswith('jax._src')",
        "tracer._trace",
        "from jax.extend import core as jex\njex.Var(aval)",
        "from jax.extend.core import Literal\nLiteral(1, aval)",
        "import flax.linen as nn\nnn.Module.sow = watch",
        "traceback.raw_frames()",
        "device.client.runtime_type",
    ],
)
def test_private_uses_are_seen(planted: str) -> None:
    assert private_uses(f'"""jax._src is private."""\n{planted}\n', HOUSE / "cards.py", {"_own"})


def test_public_uses_are_none() -> None:
    text = """
        'Says jax._src and key<fry>.'
        from cjax.plan import _own
        from jax.extend import core as jex
        from typing import Literal
        import jax
        def f(eqn: jex.JaxprEqn, kind: Literal["a"]) -> None:
            'Not `jax._src`.'
            match eqn:
                case jex.Literal(): return
            self._own, eqn.params["jaxpr"], eqn.primitive.name, type(eqn) is jex.Var, state._replace(x=1), f.__code__
            self.value = jax.config.jax_enable_x64
    """
    assert not private_uses(textwrap.dedent(text), HOUSE / "cards.py", {"_own"})


def test_private_jax_is_in_one_room() -> None:
    """See `cjax/jax_compat`: each such use is a function there, with a test that a new JAX has to pass."""
    own = set().union(*(own_private_names(path.read_text()) for path in FILES))
    found = {
        str(path.relative_to(ROOT)): uses
        for path in FILES
        if not path.is_relative_to(HOUSE / PRIVATE_ROOM) and (uses := private_uses(path.read_text(), path, own))
    }
    assert not found, f"private to JAX or Flax, and not in cjax/{PRIVATE_ROOM}: {found}"


def untyped(text: str) -> list[int]:
    """Lines of annotations, and of names for types, with `Any` in them."""
    found: list[int] = []
    for node in ast.walk(ast.parse(text)):
        notes: list[ast.expr | None] = []
        match node:
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
                notes = [node.returns, *(arg.annotation for arg in given if arg is not None)]
            case ast.AnnAssign():
                notes = [node.annotation, node.value if dotted(node.annotation) == "TypeAlias" else None]
            case ast.Assign():  # `Atom = Any`
                notes = [node.value]
        for part in (part for note in notes if note is not None for part in ast.walk(note)):
            quoted = isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier()
            if dotted(part).rpartition(".")[2] == "Any" or (quoted and part.value == "Any"):
                found.append(part.lineno)
    return sorted(found)


def test_untyped_is_seen() -> None:
    planted = """
        from typing import Any
        import typing
        Atom = Any
        Rule = Callable[[Var], list[Any]]
        def f(x: Any, *rest: dict[str, Any], typed: Var, **more: "Any") -> list[typing.Any]:
            'Any of them.'
            y: set[Any] = set()
            return [x, "Any way", cast(Var, y)]
    """
    assert untyped(textwrap.dedent(planted)) == [4, 5, 6, 6, 6, 6, 8]


def test_the_typed_room_says_what_it_takes() -> None:
    files = [path for path in FILES if path.is_relative_to(HOUSE / TYPED_ROOM)]
    found = {str(path.relative_to(ROOT)): untyped(path.read_text()) for path in files}
    more = {name: lines for name, lines in found.items() if len(lines) > UNTYPED.get(name, 0)}
    assert not more, f"annotations with Any; types of traces are in cjax/jax_compat/core.py: {more}"
    fewer = {name: len(found.get(name, ())) for name, count in UNTYPED.items() if len(found.get(name, ())) < count}
    assert not fewer, f"fewer than the table says, which may only shrink: {fewer}"


def test_files_stay_small() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"
    median = statistics.median(lines.values())
    assert median <= MAX_MEDIAN_FILE_LINES, f"median file {median} lines, more than {MAX_MEDIAN_FILE_LINES}"


def test_functions_stay_short() -> None:
    lengths = [found for path in FILES for found in functions(path)]
    long = [f"{name} {count}" for name, count in lengths if count > MAX_FUNCTION_LINES]
    assert len(long) <= MAX_SHARE_OF_LONG_FUNCTIONS * len(lengths), f"{len(long)} of {len(lengths)}: {long}"


def test_import_starts_no_backend() -> None:
    """JAX refuses to change the number of devices once a backend runs, and nothing compiles without one."""
    code = "import jax, cjax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rooms_are_there_after_import_and_loaded_when_asked_for() -> None:
    code = (
        "import sys, cjax; assert not {'cjax.data', 'cjax.train', 'grain'} & sys.modules.keys()\n"
        "assert {'data', 'train', 'models', 'optim', 'pipeline', 'parallelize'} <= set(dir(cjax))\n"
        "assert cjax.train.fit and cjax.data.text_data and cjax.models.GPT and cjax.optim.lamb and cjax.pipeline\n"
        "assert not hasattr(cjax, 'trian')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_folder_above_a_clone_does_not_hide_it(tmp_path: Path) -> None:
    """Python takes a folder named cjax for a package without code, and a finder of setuptools comes too late to say
    better. With `package-dir` said, setuptools writes a path in its place."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "."}
    (tmp_path / "cjax").mkdir()
    code = f"import sys; sys.path.append({str(ROOT)!r}); import cjax; print(cjax.__file__, cjax.simulate)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(HOUSE / "__init__.py")), found.stderr


def test_programs_over_several_devices_say_how_they_are_compiled() -> None:
    """Whoever places results over a mesh also gives `compiler_options`: without them, CPU devices deadlock, rarely."""
    found = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.jit":
                given = {keyword.arg for keyword in node.keywords}
                if "out_shardings" in given:
                    found += 1
                    assert "compiler_options" in given, f"{path.name}:{node.lineno}"
    assert found > 5
