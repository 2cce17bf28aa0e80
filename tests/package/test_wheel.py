"""The wheel holds every module, the type marker and the right version, and needs no compiler."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from job import CHECKOUT

pytestmark = pytest.mark.job


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKOUT / "hvlike", source / "hvlike", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hvlike").rglob("*.py")} | {"hvlike/py.typed"}
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests/", "examples/"))}

    import hvlike

    assert wheel.name == f"hvlike-{hvlike.__version__}-py3-none-any.whl"
