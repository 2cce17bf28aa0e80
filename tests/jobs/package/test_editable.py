"""An installation that follows a checkout is found from everywhere, also beside a folder that is called hvlike."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from support.job import CHECKOUT

BUILD = "import sys; sys.path.insert(0, 'scripts/lib'); import build_backend; build_backend.build_editable(sys.argv[1])"
# Without the packages of this Python, among which hvlike is.
IMPORT = "import site, sys; site.addsitedir(sys.argv[1]); sys.path.insert(0, ''); import hvlike; print(hvlike.__file__)"


def test_a_folder_of_that_name_does_not_hide_it(tmp_path: Path) -> None:
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    shutil.copytree(CHECKOUT / "hvlike", source / "hvlike", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    shutil.copytree(CHECKOUT / "scripts" / "lib", source / "scripts" / "lib")
    (source / "examples").mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    (elsewhere / "hvlike").mkdir(parents=True)
    command = [sys.executable, "-S", "-E", "-c", IMPORT, str(installed)]
    found = subprocess.run(command, cwd=elsewhere, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(found) == source / "hvlike" / "__init__.py"
