"""Source distribution and wheel hold every module, the type marker and the right version, and need no compiler."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from support.job import CHECKOUT


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
        assert expected <= {name.partition("/")[2] for name in opened.getnames()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert not {name for name in names if name.startswith(("tests/", "examples/", "docs/"))}

    import hvlike

    assert wheel.name == f"hvlike-{hvlike.__version__}-py3-none-any.whl"
