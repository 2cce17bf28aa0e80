"""Source distribution and wheel hold every module, the type marker, the license and no more; PyPI would take them."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from support.job import CHECKOUT

import hvlike

OF_SOURCE = {"pyproject.toml", "setup.cfg", "README.md", "LICENSE", "PKG-INFO"}
OF_WHEEL = {"METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}


def test_both_distributions_are_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKOUT / "hvlike", source / "hvlike", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    # The wheel is built from the source distribution.
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    expected = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "hvlike").rglob("*.py")} | {"hvlike/py.typed"}
    with tarfile.open(archive) as opened:
        files = {each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()}
    assert {each for each in files if not each.startswith("hvlike.egg-info/")} == expected | OF_SOURCE
    information = f"hvlike-{hvlike.__version__}.dist-info"
    assert set(zipfile.ZipFile(wheel).namelist()) == expected | {f"{information}/{each}" for each in OF_WHEEL}
    assert archive.name == f"hvlike-{hvlike.__version__}.tar.gz"
    assert wheel.name == f"hvlike-{hvlike.__version__}-py3-none-any.whl"
    # What PyPI would refuse: a description that does not render, metadata that is not there.
    check = [sys.executable, "-m", "twine", "check", "--strict", str(archive), str(wheel)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
