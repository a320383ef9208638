"""The house keeps its rules (`architecture.py`, `naming.py`, `private_uses.py`), and each sees what it is to refuse."""

import functools
import inspect
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import architecture
import naming
import private_uses
import pytest
from architecture import ROOT, Rule, Tree, house
from forked import Forks
from private_uses import private_jax_is_in_one_room

HOUSE = architecture.read()
SIGNATURE = {"tree": Tree, "return": list[str]}
RULES: list[Rule] = [
    found
    for module in (architecture, naming, private_uses)
    for found in vars(module).values()
    if inspect.isfunction(found) and found.__module__ == module.__name__ and inspect.get_annotations(found) == SIGNATURE
]

Changes = dict[str, str | None]


def adds(path: str, text: str) -> Changes:
    return {path: f"{HOUSE[path]}\n{text}\n"}


def removes(folder: str) -> Changes:
    return {path: None for path in HOUSE if path.startswith(f"{folder}/")}


@functools.cache
def kept(rule: Rule) -> list[str]:
    """What a rule finds in the house as it is."""
    return rule(HOUSE)


def changed(changes: Changes) -> dict[str, str]:
    return {path: text for path, text in (HOUSE | changes).items() if text is not None}


LONG_FUNCTION = "def long() -> None:\n" + "    print()\n" * architecture.MAX_FUNCTION_LINES
HELPER = """
def {name}({arg}: {kind}) -> float:
    {doc}
    {made}{of} = sum(x * x for x in {arg})
    return {made} / len({arg}) if {arg} else 0.0
"""
ONE = HELPER.format(name="square_mean", arg="values", kind="list[float]", doc="'The mean.'", made="total", of="")
OTHER = HELPER.format(name="_power", arg="signal", kind="tuple", doc="'Of a signal.'", made="energy", of=": float")

# The rule, what is planted in the house, and what the rule says of it.
BREACHES: list[tuple[Rule, Changes, str]] = [
    (architecture.rooms_are_those_of_the_design, {"cjax/attic.py": ""}, "attic"),
    (architecture.rooms_are_those_of_the_design, {"cjax/attic/box.py": ""}, "attic"),
    (architecture.rooms_are_those_of_the_design, removes("cjax/audit"), "audit"),
    (architecture.folders_of_rooms_have_a_floor, {"cjax/trace/drawer/box.py": ""}, "trace/drawer"),
    (architecture.folders_of_rooms_have_a_floor, {"cjax/plan/drawer/box.py": ""}, "plan/drawer"),
    (architecture.folders_of_rooms_have_a_floor, {"cjax/trace/dims/deep/box.py": ""}, "dims/deep"),
    (architecture.folders_of_rooms_have_a_floor, removes("cjax/trace/stages"), "trace/stages"),
    (architecture.leaves_are_leaves, adds("cjax/cards.py", "from cjax.tree import leaf_names"), "cjax/tree.py"),
    (architecture.leaves_are_leaves, adds("cjax/jax_compat/jaxprs.py", "from .. import tree"), "cjax/tree.py"),
    (architecture.leaves_are_leaves, adds("cjax/models/past.py", "import cjax"), "cjax/__init__.py"),
    (architecture.leaves_are_leaves, {"cjax/cards.py": None}, "not there"),
    (architecture.fronts_of_folders_say_a_sentence, {"cjax/trace/dims/__init__.py": "from . import find"}, "dims.find"),
    (architecture.fronts_of_folders_say_a_sentence, {"cjax/trace/dims/__init__.py": "import jax"}, "jax"),
    (architecture.imports_point_down, adds("cjax/plan/plan.py", "import cjax.program"), "cjax/program"),
    (architecture.imports_point_down, adds("cjax/pipeline/table.py", "from .. import sharding"), "cjax/sharding"),
    (
        architecture.imports_point_down,
        adds("cjax/sharding/place/place.py", "from ...pipeline import build"),
        "pipeline",
    ),
    (architecture.imports_point_down, adds("cjax/trace/reading.py", "from cjax.mesh import simulate"), "cjax/mesh"),
    (architecture.imports_point_down, adds("cjax/trace/dims/find.py", "from ...plan import Plan"), "cjax/plan"),
    (architecture.imports_point_down, adds("cjax/models/gpt.py", "from cjax.plan import Plan"), "cjax/plan"),
    (architecture.imports_point_down, adds("cjax/optim/lamb.py", "import cjax.models.gpt"), "cjax/models"),
    (architecture.imports_point_down, adds("cjax/gradients/build.py", "from cjax.optim import lamb"), "cjax/optim"),
    (architecture.imports_point_down, adds("cjax/program/steps.py", "from cjax.models import GPT"), "cjax/models"),
    (architecture.imports_point_down, adds("cjax/mesh/axes.py", "from cjax import *"), "cjax/__init__.py"),
    (
        architecture.imports_point_down_within_rooms,
        adds("cjax/trace/jaxpr/view.py", "from cjax.trace.attention import walk"),
        "cjax/trace/attention/walk.py",
    ),
    (
        architecture.imports_point_down_within_rooms,
        adds("cjax/trace/stages/stages.py", "from ..attention.find import Attention"),
        "cjax/trace/attention/find.py",
    ),
    (
        architecture.imports_point_down_within_rooms,
        adds("cjax/trace/dims/find.py", "from .. import reading"),
        "cjax/trace/reading.py",
    ),
    (
        architecture.no_import_hides,
        adds("cjax/plan/text.py", "def f():\n    from cjax.tree import leaf_names"),
        "cjax/tree.py inside",
    ),
    (architecture.no_import_hides, adds("cjax/plan/text.py", "f = lambda: __import__('cjax.tree')"), "by a call"),
    (
        architecture.no_import_hides,
        adds("cjax/plan/text.py", "import importlib\nx = importlib.import_module('cjax.program')"),
        "by a call",
    ),
    (architecture.no_circles, adds("cjax/plan/parts.py", "from .plan import Plan"), "cjax/plan/plan.py"),
    (
        architecture.no_circles,
        {
            "cjax/audit/one.py": "import cjax.report.box",
            "cjax/report/box.py": "",
            "cjax/report/two.py": "import cjax.audit",
        },
        "audit -> report -> audit",
    ),
    (
        architecture.nobody_imports_what_stands_on_top,
        adds("cjax/cards.py", "def f():\n    import experiments.shared"),
        "cards.py",
    ),
    (architecture.nobody_imports_what_stands_on_top, adds("cjax/train/fit.py", "import large_batch"), "large_batch"),
    (architecture.nobody_imports_what_stands_on_top, adds("cjax/train/fit.py", "from training.runs import run"), "run"),
    (architecture.nobody_imports_what_stands_on_top, adds("cjax/train/fit.py", "import zoo"), "zoo"),
    (architecture.nobody_imports_what_stands_on_top, adds("experiments/train_gpt.py", "import zoo"), "zoo"),
    (architecture.nobody_imports_what_stands_on_top, adds("tests/zoo.py", "from experiments import shared"), "zoo.py"),
    (architecture.experiments_point_down, adds("experiments/train_gpt.py", "import train_vit"), "train_vit"),
    (architecture.experiments_point_down, adds("experiments/shared/timing.py", "import bench_gpu"), "bench_gpu"),
    (architecture.experiments_point_down, adds("experiments/shared/timing.py", "import training.runs"), "training"),
    (
        architecture.experiments_point_down,
        adds("experiments/pipelines/tables.py", "from tensor_modes.measure import measure"),
        "tensor_modes",
    ),
    (architecture.experiments_point_down, {"experiments/pipeline/__init__.py": ""}, "hide the command"),
    (architecture.tests_mirror_the_house, {"tests/trace/softmax/test_find.py": ""}, "cjax/trace/softmax"),
    (architecture.tests_mirror_the_house, {"tests/attic/test_box.py": ""}, "cjax/attic"),
    (architecture.tests_mirror_the_house, {"experiments/tuning/rates.py": ""}, "test_tuning.py"),
    (architecture.no_drawers, {"cjax/trace/utils.py": ""}, "utils"),
    (architecture.no_drawers, {"cjax/helpers/box.py": ""}, "helpers"),
    (architecture.no_drawers, {"experiments/misc/box.py": ""}, "misc"),
    (architecture.classes_have_names_of_their_own, adds("cjax/report/step.py", "class Plan: ..."), "cjax/plan/plan.py"),
    (architecture.classes_have_names_of_their_own, adds("cjax/models/t5.py", "class GPT: ..."), "cjax/models/gpt.py"),
    *(
        (architecture.primitives_are_known_by_the_vocabulary, adds("cjax/trace/reading.py", text), "trace/reading.py")
        for text in (
            "x = eqn.primitive.name",
            "def f(primitive): primitive.name",
            "x = of[0].primitive.name",
        )
    ),
    (
        architecture.helpers_are_written_once,
        adds("cjax/cards.py", ONE) | adds("cjax/audit/read.py", OTHER),
        "_power and cjax/cards.py",
    ),
    *(
        (architecture.traces_are_typed, adds("cjax/trace/reading.py", text), "cjax/trace/reading.py")
        for text in (
            "Atom = Any",
            "Rule: TypeAlias = Callable[[Var], list[Any]]",
            "def f(x: Any) -> None: ...",
            "def f(*rest: dict[str, Any]) -> None: ...",
            "def f(**more: 'Any') -> None: ...",
            "def f() -> list[typing.Any]: ...",
            "y: set[Any] = set()",
            "def f(x: 'dict[str, Any]') -> None: ...",
            "y = cast(Any, 1)",
            "class Held(dict[str, Any]): ...",
            "T = TypeVar('T', bound='Any')",
            "from typing import Any as Whatever",
        )
    ),
    *(
        (naming.retired_names_stay_retired, adds(path, text), path)
        for path, text in (
            ("cjax/trace/stages/stacks.py", "travels = ()"),
            ("cjax/gradients/build.py", "def f(together: int) -> None: ..."),
            ("cjax/trace/jaxpr/linear.py", "for carried in (): ..."),
            ("cjax/program/texts.py", "class Parts: ..."),
        )
    ),
    *(
        (naming.retired_words_stay_retired, adds(path, text), path)
        for path, text in (
            ("cjax/trace/stages/stacks.py", "# What travels with it."),
            ("cjax/pipeline/route.py", "def f() -> None:\n    '''One line.\n\n    Two of what travelled.'''"),
            ("cjax/planner/work.py", "raise ValueError(f'{1} travels')"),
            ("cjax/trace/reading.py", "x = 1  # of the Run"),
            ("cjax/program/check.py", "x = 'carried'"),
        )
    ),
    *(
        (naming.types_have_names_of_their_own, adds("cjax/cards.py", text), "cjax/plan/plan.py")
        for text in ("Plan = dict[str, int]", "Plan: TypeAlias = int | str", "Plan = np.ndarray")
    ),
    (naming.types_have_names_of_their_own, adds("cjax/audit/read.py", "class Axes: ..."), "cjax/plan/plan.py"),
    (naming.types_have_names_of_their_own, {"cjax/walk/read_rows.py": ""}, "Read: in DOUBLES"),
    (architecture.traces_are_typed, {"cjax/trace/author/loss.py": "x: Any = 1"}, "fewer than UNTYPED"),
    (architecture.files_stay_small, {"cjax/trace/dims/long.py": "pass\n" * 501}, "501 lines"),
    (architecture.files_stay_small, {"experiments/shared/long.py": "pass\n" * 501}, "501 lines"),
    (architecture.files_stay_small, {"tests/trace/test_long.py": "pass\n" * 501}, "501 lines"),
    (
        architecture.files_stay_small,
        {f"cjax/cards{i}.py": "pass\n" * 201 for i in range(len(house(HOUSE)))},
        "median",
    ),
    (
        architecture.functions_stay_short,
        {f"cjax/cards{i}.py": LONG_FUNCTION for i in range(len(house(HOUSE)))},
        "long has 61 lines",
    ),
    (architecture.programs_say_how_they_are_compiled, adds("cjax/cards.py", "jax.jit(f, out_shardings=s)"), "cards"),
    (architecture.programs_say_how_they_are_compiled, adds("cjax/cards.py", "jit(f, out_shardings=s)"), "cards"),
    (
        architecture.programs_say_how_they_are_compiled,
        adds("cjax/cards.py", "functools.partial(jax.jit, out_shardings=s)"),
        "cards",
    ),
    *(
        (private_jax_is_in_one_room, adds("cjax/cards.py", text), "cjax/cards.py")
        for text in (
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
        )
    ),
]

PUBLIC_USES = """
    'Says jax._src and key<fry>.'
    from cjax.plan import _own
    from jax.extend import core as jex
    from typing import Literal
    import jax
    def f(eqn: jex.JaxprEqn, kind: Literal["a"]) -> None:
        'Not `jax._src`.'
        self._own = kind
        match eqn:
            case jex.Literal(): return
        self._own, eqn.params["jaxpr"], eqn.primitive.name, type(eqn) is jex.Var, state._replace(x=1), f.__code__
        self.value = jax.config.jax_enable_x64
"""
# What the rules must let pass.
ALLOWED: list[tuple[Rule, Changes]] = [
    (private_jax_is_in_one_room, adds("cjax/cards.py", textwrap.dedent(PUBLIC_USES))),
    (private_jax_is_in_one_room, adds("cjax/jax_compat/jaxprs.py", "from jax._src import core")),
    (architecture.imports_point_down, adds("cjax/cli/run.py", "from cjax.models import GPT")),
    (architecture.imports_point_down, adds("cjax/program/steps.py", "from cjax.optim import lamb")),
    (architecture.imports_point_down, adds("cjax/report/step.py", "from cjax.audit import Audit")),
    (architecture.imports_point_down_within_rooms, adds("cjax/trace/reading.py", "from .dims import find")),
    (architecture.no_circles, adds("cjax/plan/plan.py", "import cjax.plan.parts")),
    (architecture.experiments_point_down, adds("experiments/train_gpt.py", "from shared.timing import Timing")),
    (
        architecture.classes_have_names_of_their_own,
        adds("cjax/models/gpt.py", "class Attention: ...\nclass _Plan: ..."),
    ),
    (architecture.classes_have_names_of_their_own, adds("cjax/cli/plan.py", "class Plan: ...")),
    (architecture.primitives_are_known_by_the_vocabulary, adds("cjax/trace/reading.py", "x = slot.name, name_of(eqn)")),
    (
        architecture.helpers_are_written_once,
        adds("cjax/cards.py", ONE) | adds("cjax/tree.py", OTHER.replace("/", "//")),
    ),
    (architecture.functions_stay_short, adds("cjax/cards.py", LONG_FUNCTION)),
    (naming.retired_names_stay_retired, adds("cjax/trace/reading.py", "x = f(carried=1, together=2)")),
    (naming.retired_words_stay_retired, adds("cjax/trace/reading.py", "# Runs of the model, together.\nx.travels")),
    (naming.types_have_names_of_their_own, adds("cjax/cards.py", "PLAN = Plan(1)\nPlan = f(x)\nplan = Plan")),
    (
        architecture.programs_say_how_they_are_compiled,
        adds("cjax/cards.py", "jax.jit(f, out_shardings=s, compiler_options=o)\nstore(f, out_shardings=s)"),
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    breaches = kept(rule)
    assert not breaches, "\n".join([rule.__doc__ or rule.__name__, *breaches])


@pytest.mark.parametrize(("rule", "changes", "said"), BREACHES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_breach_is_seen(rule: Rule, changes: Changes, said: str) -> None:
    found = [breach for breach in rule(changed(changes)) if breach not in kept(rule)]
    assert any(said in breach for breach in found), found


@pytest.mark.parametrize(("rule", "changes"), ALLOWED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_allowed_is_no_breach(rule: Rule, changes: Changes) -> None:
    assert not rule(changed(changes))


def test_a_breach_of_each_rule_is_planted() -> None:
    assert {rule.__name__ for rule, _, _ in BREACHES} == {rule.__name__ for rule in RULES}
    assert len(RULES) >= 18


def test_the_circle_is_named() -> None:
    assert architecture.find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert architecture.find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_there_is_something_to_keep_rules_about() -> None:
    assert len(list(architecture.jits_over_several_devices(HOUSE))) > 5
    assert len(house(HOUSE)) > 200


def run(code: str, folder: Path = ROOT, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


# JAX refuses to change the number of devices once a backend runs, and nothing compiles without one.
IMPORTED = """
import sys, jax, cjax
{planted}
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3, "a backend runs"
assert not {{"cjax.data", "cjax.train", "grain"}} & sys.modules.keys(), "loaded too early"
assert {{"data", "train", "models", "optim", "pipeline", "parallelize"}} <= set(dir(cjax))
assert cjax.train.fit and cjax.data.text_data and cjax.models.GPT and cjax.optim.lamb and cjax.pipeline
assert not hasattr(cjax, "trian")
"""


def test_import_starts_no_backend_and_loads_rooms_when_they_are_asked_for() -> None:
    done = run(IMPORTED.format(planted=""))
    assert done.returncode == 0, done.stderr


@pytest.mark.full("jax.devices()-jax_num_cpu_devices")
@pytest.mark.parametrize(
    ("planted", "said"), [("jax.devices()", "jax_num_cpu_devices"), ("import cjax.data", "loaded too early")]
)
def test_what_an_import_must_not_do_is_seen(planted: str, said: str, forks: Forks) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = forks.run(["-c", IMPORTED.format(planted=planted)], environment)
    assert done.returncode == 1 and said in done.stderr, done.stderr


@pytest.mark.parametrize("planted", [False, True])
def test_the_folder_above_a_clone_does_not_hide_it(planted: bool, tmp_path: Path) -> None:
    """Python takes a folder named cjax for a package without code, and a finder of setuptools comes too late to say
    better. With `package-dir` said, an editable install is a path in its place."""
    clone, site = tmp_path / "cjax", tmp_path / "site"
    (clone / "cjax").mkdir(parents=True)
    (clone / "cjax" / "__init__.py").write_text('__version__ = "0"\n')
    (clone / "README.md").write_text("")
    (clone / "LICENSE").write_text("")
    settings = (ROOT / "pyproject.toml").read_text()
    without = re.sub(r"^package-dir = .*\n", "", settings, flags=re.M)
    assert without != settings
    (clone / "pyproject.toml").write_text(without if planted else settings)
    built = run("from setuptools import build_meta\nprint(build_meta.build_editable('.'))", clone)
    assert built.returncode == 0, built.stderr
    zipfile.ZipFile(clone / built.stdout.splitlines()[-1]).extractall(site)
    # Without the packages of this environment, where a cjax may be installed too.
    code = f"import site\nsite.addsitedir({str(site)!r})\nimport cjax\nprint(cjax.__file__)"
    done = run(code, tmp_path, "-S")
    assert done.stdout.strip() == ("None" if planted else str(clone / "cjax" / "__init__.py")), done.stderr
