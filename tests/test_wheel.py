"""A wheel, installed alone in an environment of its own, has all of cjax and says what it is.

Nothing is downloaded: the wheel is built by the setuptools that is here, and what cjax depends on is found where the
tests have it, behind the new environment's own packages.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest

import cjax

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "cjax"
# Every module is imported, from the wheel and from nowhere else.
WALK = """
import importlib, pkgutil, cjax
names = ["cjax", *(found.name for found in pkgutil.walk_packages(cjax.__path__, "cjax."))]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(cjax.__file__, cjax.__version__, *names, sep="\\n")
"""


def run(*command: str | Path, cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves folders beside what it builds."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(HOUSE, clone / "cjax", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", clone / "dist", ".", cwd=clone)
    (built,) = (clone / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; the packages of this one come behind its own."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    # The folder alone, and not what its own .pth files name, which may be this clone.
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.mark.full
def test_every_module_is_there_and_can_be_imported(environment: Path) -> None:
    file, version, *names = run(environment / "bin" / "python", "-c", WALK, cwd=environment).splitlines()
    assert Path(file).is_relative_to(environment) and version == cjax.__version__
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in HOUSE.rglob("*.py")}
    assert set(names) == {name.removesuffix(".__init__") for name in modules}


def test_the_command_is_there(environment: Path) -> None:
    assert "cjax COMMAND --help" in run(environment / "bin" / "cjax", "--help", cwd=environment)


def test_it_holds_what_git_holds_of_cjax_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {str(path.relative_to(ROOT)) for path in HOUSE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert held == files and "cjax/py.typed" in held


def test_it_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(archive.read(place).decode())
        license_text = archive.read(place.replace("METADATA", "licenses/LICENSE")).decode()
    assert (said["Name"], said["Version"]) == ("cjax", cjax.__version__)
    assert said["License-Expression"] == "Apache-2.0" and license_text == (ROOT / "LICENSE").read_text()
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert {"data", "cli", "weights", "gpu", "aot", "docs", "test"} <= set(said.get_all("Provides-Extra", []))


IMPORT = re.compile(r"^( *)(?:import|from) (\w+)[\w.]*(?: as \w+| import .*)?(?:  #.*)?$", re.M)
# What is imported and installed under another name.
INSTALLED_AS = {"PIL": "pillow", "orbax": "orbax-checkpoint", "pynvml": "nvidia-ml-py", "mlflow": "mlflow-skinny"}
# What no extra brings: an error says what to install, and for what.
ASKED_FOR = {"sklearn"}


def names_of(requirements: Iterable[str]) -> set[str]:
    """Packages by name, of what an installation always takes."""
    always = [each for each in requirements if "extra ==" not in each]
    return {re.split(r"[^\w.-]", each, maxsplit=1)[0].lower().replace("_", "-") for each in always}


def imported() -> dict[str, set[str]]:
    """What each package beside Python's own is imported by; `at the top` of a file, or where it is needed alone."""
    found: dict[str, set[str]] = {}
    for path in HOUSE.rglob("*.py"):
        for indent, name in IMPORT.findall(path.read_text()):
            if name not in sys.stdlib_module_names and name != "cjax":
                place = "in cjax/cli" if path.parent.name == "cli" else "within" if indent else "at the top"
                found.setdefault(name, set()).add(place)
    return found


def test_what_is_imported_is_asked_for() -> None:
    """At the top of a file what every installation has; within also what users' extras bring; in cjax/cli its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = names_of(project["dependencies"])
    base |= {name for each in base for name in names_of(metadata.requires(each) or [])}
    extras = project["optional-dependencies"]
    users = names_of(each for extra, needs in extras.items() if extra not in ("docs", "test") for each in needs)
    brought = {"at the top": base, "in cjax/cli": base | names_of(extras["cli"]), "within": base | users}
    found = imported()
    assert {"jax", "numpy", "tyro", "ray"} <= found.keys()
    missing = {
        (name, place) for name, places in found.items() for place in places
        if name not in ASKED_FOR and INSTALLED_AS.get(name, name).lower().replace("_", "-") not in brought[place]
    }  # fmt: skip
    assert missing == set(), "name it among the dependencies or in an extra, and import it where it is needed"


def test_the_changelog_knows_this_version() -> None:
    (newest, *_) = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest in ("Unreleased", cjax.__version__)
