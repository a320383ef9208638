"""The site is built from docs/ and docstrings without a warning, and a warning would fail it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`make docs`, into a folder of the test's own."""
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_has_every_page(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing", "changelog"}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    assert (site / "license.txt").read_text() == (ROOT / "LICENSE").read_text()


def test_links_of_the_readme_lead_to_pages(site: Path) -> None:
    start = (site / "index.html").read_text()
    assert 'href="plans.html"' in start and 'href="what-works.html#what-is-not-there-yet"' in start
    assert 'href="docs/' not in start and not re.search(r'href="[^":]*\.md', start)


def test_the_reference_has_arguments_and_examples(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert 'id="cjax.parallelize.parallelize"' in page and 'id="cjax.parallelize"' not in page  # no room for it
    assert 'id="cjax.Program.step"' in page and 'id="cjax.train.fit.fit"' in page
    assert "highlight" in page and "&gt;&gt;&gt; tree[" not in page  # examples are code, and no Markdown


def test_a_broken_link_fails_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[gone](nowhere.md)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: []\nplugins: []\nnav: [index.md]\n")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stdout + done.stderr


@pytest.mark.parametrize("file", ["docs/hooks.py", "docs/docstrings.py"])
def test_examples_of_its_parts(file: str) -> None:
    done = subprocess.run([sys.executable, "-m", "doctest", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
