import os
import runpy
import subprocess
import sys

import jax
import pytest
from forked import Forks

import cjax
from cjax.cli import main


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The command line as a user has it: a process of its own, in which JAX has not started."""
    return subprocess.run(
        [sys.executable, "-m", "cjax", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_the_package_run_as_a_module_is_the_command_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cjax", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("cjax", run_name="__main__")
    assert "check-model" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("train", "plan", "run", "check", "check-model", "inspect"):
        assert f"  {name} " in text
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"cjax {cjax.__version__}, JAX {jax.__version__}"


@pytest.mark.parametrize("command", ["train", "plan", "run", "check", "check-model", "inspect"])
def test_each_command_explains_its_options(command: str, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: cjax {command}" in text


def test_options_are_explained_by_the_docstrings(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "rows of the global batch" in capsys.readouterr().out


def test_a_mistyped_command_is_guessed(capsys):
    assert main(["trian"]) == 2
    assert "did you mean cjax train?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    said = capsys.readouterr().err
    assert (
        "there are train, plan, generate, run, status, resize, submit, cluster, replay, check, check-model, inspect"
        in said
    )


def test_a_mistake_is_one_message_and_the_traceback_on_request(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CJAX_TRACEBACK", raising=False)
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("cjax inspect: there is no checkpoint in")
    monkeypatch.setenv("CJAX_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["inspect", str(tmp_path)])


def test_without_its_packages_it_says_what_to_install(forks: Forks):
    code = "import sys; sys.modules['tyro'] = None; from cjax.cli import main; sys.exit(main(['check']))"
    ran = forks.run(["-c", code], os.environ)
    assert ran.returncode == 1
    assert 'needs tyro and rich: pip install "cjax[cli]"' in ran.stderr
