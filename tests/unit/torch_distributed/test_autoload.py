"""`import torch` learns the name of the backend and little else, and goes on whatever happens there."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvlike.errors import UsageError
from hvlike.torch_distributed import autoload

CHECKOUT = Path(__file__).resolve().parents[3]


def run(program: str, *paths: Path | str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that no launcher has started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_", "RANK"))}
    environment = {**kept, "PYTHONPATH": ":".join(map(str, (CHECKOUT, *paths))), **variables}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with what an installation leaves of setup.cfg's entry points."""
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    folder = tmp_path / "hvlike-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hvlike\nVersion: 9\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]{setup['options.entry_points']['torch.backends']}\n")
    return tmp_path


LOOK = """
import os, sys
before = dict(os.environ)
import torch
import torch.distributed as dist
if hasattr(dist.Backend, "HVLIKE"):
    backend = dist.Backend
    assert backend("hvlike") == "hvlike" == backend.HVLIKE
    assert backend.backend_capability["hvlike"] == ["cpu", "cuda"]
    assert backend.default_device_backend_map["cpu"] == "gloo"
    loaded = [name for name in sys.modules if name.startswith("hvlike")]
    assert len(loaded) <= 4, loaded
    assert not {"mpi4py", "numpy.testing"} & set(sys.modules)
print(hasattr(dist.Backend, "HVLIKE"))
print(sorted(set(os.environ.items()) - set(before.items())))
dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    print("number", dist.group.WORLD._get_sequence_number_for_group())
except RuntimeError as error:
    print(error)
import hvlike
assert dist.Backend.HVLIKE == "hvlike"
"""


def test_import_torch_registers_the_backend_and_changes_little_else(installed: Path) -> None:
    """Also not under a launcher, as programs take WORLD_SIZE for a sign that MASTER_ADDR is set, too. Torch gives
    "cpu:gloo" no default backend as soon as any backend was registered; torch 2.5 never does. Where it shall load no
    extensions only `import hvlike` registers it.
    """
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
    done, without = run(LOOK, installed, **mpich), run(LOOK, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **mpich)
    assert (done.returncode, without.returncode) == (0, 0), done.stderr + without.stderr
    assert done.stdout.splitlines() == ["True", *without.stdout.splitlines()[1:]]
    assert without.stdout.startswith("False")
    assert "hvlike" not in done.stderr
    assert "Warning" not in done.stderr


def test_a_group_with_a_torch_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    with pytest.raises(UsageError, match=r"needs torch 2\.7 or newer, got 2\.6\.0\+cu124"):
        dist.init_process_group("hvlike", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def refuse(*arguments: object, **named: object) -> None:
    raise TypeError("register_backend() got an unexpected keyword argument 'extended_api'")


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose register_backend takes less."""
    monkeypatch.delattr(dist.Backend, "HVLIKE")
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)


@pytest.mark.usefixtures("too_old")
def test_a_fault_is_a_warning_that_says_what_to_do() -> None:
    with pytest.warns(RuntimeWarning, match=r"unexpected keyword argument.*TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        autoload.register()


@pytest.mark.usefixtures("too_old")
def test_a_fault_ends_no_import_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoload.register()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in capsys.readouterr().err
