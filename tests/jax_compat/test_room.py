"""What the room promises of each of its functions: what is private, where it was tried, and a test."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import flax
import jax
import pytest

import cjax.jax_compat

ROOM = Path(cjax.jax_compat.__file__).parent
FILES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")


def functions(name: str) -> dict[str, Any]:
    module = importlib.import_module(f"cjax.jax_compat.{name}")
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name: value for name, value in own.items() if inspect.isfunction(value) and not name.startswith("_")}


FUNCTIONS = {(file, name): function for file in FILES for name, function in functions(file).items()}


@pytest.mark.parametrize("file, name", FUNCTIONS)
def test_each_says_what_is_private_and_has_a_test(file: str, name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[file, name]) or ""
    found = [re.search(rf"^{word}: \S", text, re.M) for word in ("Private", "Tried", "Public instead")]
    assert all(found), f"{name} of {file}.py says nothing of one of these: Private, Tried, Public instead"
    tests = (Path(__file__).parent / f"test_{file}.py").read_text().partition("\ndef ")[2]
    assert re.search(rf"\b{name}\b", tests), f"test_{file}.py has no test of {name}"


@pytest.mark.parametrize("file, name", FUNCTIONS)
def test_each_was_tried_on_this_version(file: str, name: str) -> None:
    """A new JAX or Flax: run the tests of this folder and the suite with it, then say so in the docstrings."""
    library = flax if file == "modules" else jax
    tried = re.search(r"^Tried: (.*)", inspect.getdoc(FUNCTIONS[file, name]) or "", re.M)
    assert tried is not None
    here = ".".join(library.__version__.split(".")[:2])
    known = {".".join(version.split(".")[:2]) for version in re.findall(r"[\d.]+\d", tried[1])}
    assert here in known, f"{name} was not tried on {library.__name__} {library.__version__}: {tried[1]}"
