"""The source distribution holds all that packagers need, the wheel every module and no more; PyPI would take both."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from support.job import CHECKOUT

import hvlike

FOLDERS = (".ci", "docs", "examples", "hvlike", "scripts", "tests")
FILES = (
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
)
RELATIVE = re.compile(r"\]\((?!https://)[^)]*\)")
MADE_BY_TOOLS = shutil.ignore_patterns("__pycache__", "out", ".*_cache", "*.egg-info", ".hypothesis")
OF_WHEEL = {"METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}


def test_both_distributions_are_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(CHECKOUT / folder, source / folder, ignore=MADE_BY_TOOLS)
    for name in FILES:
        shutil.copy(CHECKOUT / name, source)
    in_checkout = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    # The wheel is built from the source distribution.
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    expected = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hvlike").rglob("*.py")} | {"hvlike/py.typed"}
    with tarfile.open(archive) as opened:
        files = {each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()}
    assert {name for name in files if not name.startswith("hvlike.egg-info/")} == in_checkout | {"PKG-INFO"}
    information = f"hvlike-{hvlike.__version__}.dist-info"
    assert set(zipfile.ZipFile(wheel).namelist()) == expected | {f"{information}/{name}" for name in OF_WHEEL}
    assert archive.name == f"hvlike-{hvlike.__version__}.tar.gz"
    assert wheel.name == f"hvlike-{hvlike.__version__}-py3-none-any.whl"
    description = zipfile.ZipFile(wheel).read(f"{information}/METADATA").decode()
    assert "## When to use it, and when not" in description
    assert not RELATIVE.findall(description), "a link that PyPI cannot follow"
    # What PyPI would refuse: a description that does not render, metadata that is not there.
    check = [sys.executable, "-m", "twine", "check", "--strict", str(archive), str(wheel)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
