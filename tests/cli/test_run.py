from pathlib import Path

import pytest

from cjax.cli.run import Run

from .test_main import run

SCRIPT = """
import sys
import jax
print(len(jax.devices()), jax.devices()[0].platform, sys.argv[1:])
sys.exit(5)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def test_the_script_gets_its_devices_and_its_arguments(script: str):
    ran = run("run", script, "--devices", "3", "--lr", "0.1", "fast")
    assert ran.stdout.split("\n")[0] == "3 cpu ['--lr', '0.1', 'fast']"
    assert ran.returncode == 5


def test_after_two_dashes_everything_is_the_scripts(script: str):
    options = Run.parse(["--devices", "2", "--", script, "--devices", "7", "--", "x"])
    assert (options.devices, options.script, options.arguments) == (2, script, ("--devices", "7", "--", "x"))


def test_what_cannot_run_is_refused(script: str):
    with pytest.raises(FileNotFoundError, match="no script nowhere.py"):
        Run.parse(["nowhere.py"]).run()
    with pytest.raises(ValueError, match="at least one device"):
        Run.parse([script, "--devices", "0"]).run()
