"""The house's rules, as functions of a tree of sources: each gives the breaches that it finds, as text.

A tree is text by path, read off the disk or changed in memory, so that `test_architecture.py` can plant a breach of
each rule in the house as it is.
"""

import ast
import copy
import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

Tree = Mapping[str, str]
Rule = Callable[[Tree], list[str]]

ROOT = Path(__file__).parent.parent

# Lowest first. A room may import rooms of its own floor (as long as no circle comes of it) and of the floors below.
FLOORS = (
    ("jax_compat", "tree", "cards", "plan", "machines", "users", "job", "scheduler"),
    ("mesh",),
    ("trace",),
    ("sharding", "pipeline"),
    ("planner",),
    ("gradients",),
    ("walk",),
    ("audit", "report", "checkpoint", "calibrate"),
    ("program",),
    ("parallelize", "streamed"),
    ("data",),
    ("train", "generate"),
    ("cluster",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The same within a room: its folders, lowest first; "" is what stands in the room itself.
SUBROOMS = {
    "trace": (("jaxpr",), ("author",), ("dims", "layers"), ("emit",), ("examples",), ("",),
              ("attention", "stages", "microbatches")),
    "sharding": (("storage",), ("products",), ("layout", "attention"), ("apart",), ("place",)),
    "planner": (("",), ("costs", "reading"), ("choice",)),
    "models": (("",), ("transformers",)),
    "scheduler": (("policy",), ("replay",)),
    "data": (("",), ("text", "images"), ("tasks",)),
}  # fmt: skip
SUBFLOOR_OF = {
    (room, folder): floor for room, floors in SUBROOMS.items() for floor, names in enumerate(floors) for folder in names
}
LEAVES = (
    "jax_compat",
    "tree",
    "cards",
    "job",
    "scheduler",
    "models/past",
)  # import nothing of the house but files of their own
# Stand beside the house: import nothing of it, may be imported by its top floors.
BESIDE = ("models", "optim", "attention")
# Never import each other in either direction.
STRANGERS = ({"sharding", "pipeline"}, {"trace", "mesh"}, {"trace", "plan"})
FRONT_DOORS = ("__init__", "__main__")
SHARED = "shared"  # the folder of experiments that the others may import
TEST_TOOLS = ("experiments", "planted", "search", "strangers")  # folders of tests that mirror no room
DRAWERS = ("utils", "util", "helpers", "common", "misc")
# Layers of models may have the names that papers give them, a command that of what it calls.
LAYERS = ("cjax/models/", {"Attention", "Block", "MLP"})
COMMANDS = "cjax/cli/"
VOCABULARY = "cjax/trace/jaxpr/primitives.py"

# Annotations that say nothing, by file, in a room whose every function reads what another makes. May only shrink.
TYPED_ROOM = "cjax/trace/"
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
MAX_SHARE_OF_LONG_FUNCTIONS = 0.02
MIN_NODES_OF_A_HELPER = 12  # of the syntax tree; below it two functions are alike by chance


def read(root: Path = ROOT) -> dict[str, str]:
    """What is on the disk."""
    files = (path for folder in ("cjax", "experiments", "tests") for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text() for path in files}


# -- modules and imports ----------------------------------------------------------------------------------------------
class Import(NamedTuple):
    """One name that an import statement asks for, in full."""

    line: int
    name: str
    is_inside: bool  # of a function


def module_name(path: str) -> str:
    """`cjax/trace/dims/find.py` is `cjax.trace.dims.find`; experiments and tests are found from their own folder."""
    parts = path.removesuffix(".py").split("/")
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "cjax" else parts[1:])


def house(tree: Tree) -> tuple[str, ...]:
    return tuple(path for path in tree if path.startswith("cjax/"))


def room_of(path: str) -> str:
    """`cjax/trace/dims/find.py` lives in `trace`; the package's own files are its front doors."""
    return path.split("/")[1].removesuffix(".py")


def folder_of(path: str) -> str:
    """`cjax/trace/dims/find.py` lives in the folder `dims` of its room; what stands in a room itself, in ""."""
    parts = path.split("/")[2:-1]
    return parts[0] if parts else ""


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text)))


def imported_names(node: ast.AST, path: str) -> list[str]:
    """Full dotted names of the modules (or of names inside them) that one import statement asks for."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = module_name(f"{path.rpartition('/')[0]}/__init__.py").split(".")
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


@functools.cache
def imports(path: str, text: str) -> tuple[Import, ...]:
    def visit(node: ast.AST, is_inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for name in imported_names(child, path):
                yield Import(getattr(child, "lineno", 0), name, is_inside)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, is_inside or is_function)

    return tuple(visit(parsed(text), False))


def house_imports(tree: Tree, path: str) -> Iterator[tuple[int, str, bool]]:
    """Each import of a file of cjax in `path`: line, the file's path, and whether it hides inside a function."""
    at = _files_of_modules(house(tree))
    for line, name, is_inside in imports(path, tree[path]):
        if name.split(".")[0] == "cjax":
            while name not in at and "." in name:  # `cjax.plan.Plan` lives in `cjax.plan`
                name = name.rpartition(".")[0]
            yield line, at.get(name, "cjax/__init__.py"), is_inside


@functools.cache
def _files_of_modules(paths: tuple[str, ...]) -> dict[str, str]:
    return {module_name(path): path for path in paths}


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One loop of imports, or nothing."""
    done: set[str] = set()

    def descend(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if circle := descend(target, [*trail, module]):
                return circle
        done.add(module)
        return []

    for module in sorted(graph):
        if circle := descend(module, []):
            return circle
    return []


# -- who may look at whom ---------------------------------------------------------------------------------------------
def rooms_are_those_of_the_design(tree: Tree) -> list[str]:
    there = {room_of(path) for path in house(tree)}
    known = {*FLOOR_OF, *BESIDE, *FRONT_DOORS}
    unknown = [f"{room}: a room that docs/design.md does not have" for room in sorted(there - known)]
    return unknown + [
        f"{room}: a room of the design that is not there" for room in sorted(known - there - {"__main__"})
    ]


def folders_of_rooms_have_a_floor(tree: Tree) -> list[str]:
    there = {(room_of(path), folder_of(path)) for path in house(tree)}
    unknown = {(room, folder) for room, folder in there if folder and (room, folder) not in SUBFLOOR_OF}
    deeper = [path for path in house(tree) if len(path.split("/")) > 4]
    return [
        *(f"{room}/{folder}: a folder without a floor in tests/architecture.py" for room, folder in sorted(unknown)),
        *(f"{room}/{folder}: a floor of a folder that is not there" for room, folder in set(SUBFLOOR_OF) - there),
        *(f"{path}: a folder in a folder of a room, whose imports no rule knows" for path in deeper),
    ]


def leaves_are_leaves(tree: Tree) -> list[str]:
    found = []
    for leaf in LEAVES:
        files = [path for path in tree if path == f"cjax/{leaf}.py" or path.startswith(f"cjax/{leaf}/")]
        found += [] if files else [f"{leaf}: a leaf that is not there"]
        for path in files:
            outside = [(line, target) for line, target, _ in house_imports(tree, path) if target not in files]
            found += [f"{path}:{line} imports {target}" for line, target in outside]
    return found


def fronts_of_folders_say_a_sentence(tree: Tree) -> list[str]:
    """What a folder's front imports, everyone who imports from the folder does: arrows that no rule would see."""
    fronts = [path for path in house(tree) if path.endswith("/__init__.py") and folder_of(path)]
    return [f"{path}:{line} imports {name}" for path in fronts for line, name, _ in imports(path, tree[path])]


def _may_import(importer: str, imported: str) -> bool:
    """Whether a module of room `importer` may import a module of room `imported`."""
    if importer in FRONT_DOORS or importer == imported:
        return True
    if imported in FRONT_DOORS or importer in BESIDE or {importer, imported} in STRANGERS:
        return False
    if imported in BESIDE:
        return FLOOR_OF.get(importer, -1) >= FLOOR_OF["program" if imported == "optim" else "parallelize"]
    return FLOOR_OF.get(importer, -1) >= FLOOR_OF.get(imported, -1)


def imports_point_down(tree: Tree) -> list[str]:
    return [
        f"{path}:{line} imports {target}, whose room is above or beside its own"
        for path in house(tree)
        for line, target, _ in house_imports(tree, path)
        if not _may_import(room_of(path), room_of(target))
    ]


def imports_point_down_within_rooms(tree: Tree) -> list[str]:
    found = []
    for path in house(tree):
        room, folder = room_of(path), folder_of(path)
        if path == f"cjax/{room}/__init__.py":
            continue  # the front of a room hands out what any of its folders has
        for line, target, _ in house_imports(tree, path):
            pair = (room, folder), (room, folder_of(target))
            if room in SUBROOMS and room_of(target) == room and pair[0] != pair[1]:
                mine, other = (SUBFLOOR_OF.get(each, -1) for each in pair)
                if mine <= other:
                    found.append(f"{path}:{line} imports {target}, whose folder is above or beside its own")
    return found


def no_import_hides(tree: Tree) -> list[str]:
    """Inside a function, or behind a call: a circle that is dodged. Move the room instead."""
    found = []
    for path in house(tree):
        found += [
            f"{path}:{line} imports {target} inside a function"
            for line, target, is_inside in house_imports(tree, path)
            if is_inside
        ]
        for node in nodes(tree[path]):
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
                if room_of(path) not in FRONT_DOORS:  # the package loads its rooms when they are asked for
                    found.append(f"{path}:{node.lineno} imports by a call")
    return found


def no_circles(tree: Tree) -> list[str]:
    """Neither of modules nor of rooms: two rooms of one floor may not take turns."""
    modules = {path: {target for _, target, _ in house_imports(tree, path)} - {path} for path in house(tree)}
    rooms: dict[str, set[str]] = defaultdict(set)
    for path, targets in modules.items():
        if room_of(path) not in FRONT_DOORS:
            rooms[room_of(path)] |= {room_of(target) for target in targets} - {room_of(path), *FRONT_DOORS}
    return [" -> ".join(circle) for graph in (modules, rooms) if (circle := find_circle(graph))]


def nobody_imports_what_stands_on_top(tree: Tree) -> list[str]:
    """cjax imports neither experiments nor tests, by any of the names under which they are found; nobody `experiments`
    as a whole, since it is no package."""
    on_top = {folder: _names_in(tree, folder) | {folder} for folder in ("experiments", "tests")}
    above = {
        "cjax": on_top["experiments"] | on_top["tests"],
        "experiments": (on_top["tests"] - on_top["experiments"]) | {"experiments"},
        "tests": {"experiments", "tests"},
    }
    return [
        f"{path}:{line} imports {name}"
        for path in tree
        for line, name, _ in imports(path, tree[path])
        if name.split(".")[0] in above[path.split("/")[0]]
    ]


def _names_in(tree: Tree, folder: str) -> set[str]:
    """What can be imported from a folder that is on Python's path."""
    return {path.split("/")[1].removesuffix(".py") for path in tree if path.startswith(f"{folder}/")} - {"__init__"}


def experiments_point_down(tree: Tree) -> list[str]:
    """Commands import folders, folders import themselves and `shared`, and a command is imported by nobody."""
    paths = [path for path in tree if path.startswith("experiments/")]
    commands = {module_name(path) for path in paths if path.count("/") == 1}
    folders = {path.split("/")[1] for path in paths if path.count("/") > 1}
    found = [f"{path}: a folder of this name would hide the command" for path in sorted(commands & folders)]
    for path in paths:
        own = path.split("/")[1] if path.count("/") > 1 else ""
        for line, name, _ in imports(path, tree[path]):
            other = name.split(".")[0]
            may = not own or other in (own, SHARED)
            if other in commands or (other in folders and not may):
                found.append(f"{path}:{line} imports {name}")
    return found


def tests_mirror_the_house(tree: Tree) -> list[str]:
    """A folder of tests is a room, or a folder of one, that is there; each folder of experiments has its tests."""
    there = {path.rpartition("/")[0] for path in house(tree)}
    found = []
    for path in tree:
        folder = path.rpartition("/")[0].partition("/")[2]  # of tests/trace/dims/test_find.py trace/dims
        if path.startswith("tests/") and folder and folder.split("/")[0] not in TEST_TOOLS:
            found += [] if f"cjax/{folder}" in there else [f"{path} tests cjax/{folder}, which is not there"]
    for folder in sorted({path.split("/")[1] for path in tree if path.startswith("experiments/")}):
        if not folder.endswith(".py") and f"tests/experiments/test_{folder}.py" not in tree:
            found.append(f"experiments/{folder} has no tests/experiments/test_{folder}.py")
    return found


# -- names ------------------------------------------------------------------------------------------------------------
def no_drawers(tree: Tree) -> list[str]:
    """A drawer for everything is a room for nothing."""
    paths = [path for path in tree if not path.startswith("tests/")]
    return [path for path in paths if set(path.removesuffix(".py").split("/")) & set(DRAWERS)]


def classes_have_names_of_their_own(tree: Tree) -> list[str]:
    where: dict[str, list[str]] = defaultdict(list)
    for path in house(tree):
        for node in parsed(tree[path]).body:
            is_layer = path.startswith(LAYERS[0]) and isinstance(node, ast.ClassDef) and node.name in LAYERS[1]
            if isinstance(node, ast.ClassDef) and not (node.name.startswith("_") or is_layer):
                where[node.name].append(path)
    shown = {name: [path for path in paths if not path.startswith(COMMANDS)] for name, paths in where.items()}
    return [f"{name}: a class in {', '.join(paths)}" for name, paths in shown.items() if len(paths) > 1]


def primitives_are_known_by_the_vocabulary(tree: Tree) -> list[str]:
    """By `name_of` or `word_for`: users may give a primitive of their own the name of one of JAX's."""
    return [
        f"{path}:{node.lineno} asks a primitive for its name"
        for path in house(tree)
        if path != VOCABULARY
        for node in nodes(tree[path])
        if isinstance(node, ast.Attribute) and node.attr == "name"
        if "primitive" in (getattr(node.value, "attr", ""), getattr(node.value, "id", ""))
    ]


def helpers_are_written_once(tree: Tree) -> list[str]:
    """Functions that are the same to the letter but for the names of what they are given and make."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in house(tree):
        for name, line, body in _bodies(tree[path]):
            where[body].append(f"{path}:{line} {name}")
    return [" and ".join(places) for places in where.values() if len(places) > 1]


@functools.cache
def _bodies(text: str) -> tuple[tuple[str, int, str], ...]:
    """(name, line, what it does in names of no one) of each function at a file's top."""
    found = []
    for node in parsed(text).body:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            plain = _Nameless(node).visit(ast.Module(copy.deepcopy(body), []))
            if sum(1 for _ in ast.walk(plain)) >= MIN_NODES_OF_A_HELPER:
                found.append((node.name, node.lineno, ast.dump(plain)))
    return tuple(found)


class _Nameless(ast.NodeTransformer):
    """Numbers for a function's own names; annotations of what it makes are dropped."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.names: dict[str, str] = {function.name: "itself"}
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                self.names.setdefault(node.arg, str(len(self.names)))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names.setdefault(node.id, str(len(self.names)))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.names[node.arg])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.Assign([node.target], node.value))


# -- sizes ------------------------------------------------------------------------------------------------------------
def untyped(text: str) -> list[int]:
    """Lines that say `Any`: in annotations, quoted ones too, in names for types, casts, bounds and bases."""
    found: list[int] = []
    for node in nodes(text):
        match node:
            case ast.Name(id="Any") | ast.Attribute(attr="Any"):
                found.append(node.lineno)
            case ast.alias(name="Any", asname=str()):  # by another name it would be seen nowhere
                found.append(node.lineno)
            case ast.Constant(value=str() as quoted) if re.search(r"\bAny\b", quoted):
                try:
                    found += [node.lineno for part in ast.walk(ast.parse(quoted, mode="eval")) if dotted(part) == "Any"]
                except SyntaxError:
                    pass  # words, and no type
    return sorted(found)


def traces_are_typed(tree: Tree) -> list[str]:
    """In trace, annotations say what is taken: no more of `Any` than the table has, and no table that says more."""
    found = {path: untyped(text) for path, text in tree.items() if path.startswith(TYPED_ROOM)}
    more = [f"{path}:{line}" for path, lines in found.items() if len(lines) > UNTYPED.get(path, 0) for line in lines]
    stale = [path for path, count in UNTYPED.items() if path in tree and len(found[path]) < count]
    return more + [f"{path} has fewer than UNTYPED says" for path in stale]


def files_stay_small(tree: Tree) -> list[str]:
    lines = {path: len(text.splitlines()) for path, text in tree.items()}
    long = [f"{path} has {count} lines" for path, count in lines.items() if count > MAX_FILE_LINES]
    median = statistics.median(count for path, count in lines.items() if path.startswith("cjax/"))
    return long + ([f"the median file has {median} lines"] if median > MAX_MEDIAN_FILE_LINES else [])


def functions_stay_short(tree: Tree) -> list[str]:
    lengths = [
        (f"{path}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for path in house(tree)
        for node in nodes(tree[path])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [f"{name} has {count} lines" for name, count in lengths if count > MAX_FUNCTION_LINES]
    return long if len(long) > MAX_SHARE_OF_LONG_FUNCTIONS * len(lengths) else []


# -- what is written --------------------------------------------------------------------------------------------------
def dotted(node: ast.AST) -> str:
    """`nn.Module.sow` as text; "" for what is no such chain of names."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def jits_over_several_devices(tree: Tree) -> Iterator[tuple[str, set[str | None]]]:
    """Where results are placed over a mesh, as a call of `jit` or `partial(jit, ...)`, and the options given there."""
    for path in house(tree):
        for node in nodes(tree[path]):
            if isinstance(node, ast.Call):
                called = [node.func, *node.args[:1]]
                given = {keyword.arg for keyword in node.keywords}
                if "out_shardings" in given and any(dotted(each).split(".")[-1] == "jit" for each in called):
                    yield f"{path}:{node.lineno}", given


def programs_say_how_they_are_compiled(tree: Tree) -> list[str]:
    """Whoever places results over a mesh also gives `compiler_options`: without them, CPU devices deadlock, rarely."""
    return [where for where, given in jits_over_several_devices(tree) if "compiler_options" not in given]
