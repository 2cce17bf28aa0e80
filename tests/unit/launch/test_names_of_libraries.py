"""MPI's shared object is known whatever it is called, and what MPI or mpi4py say in the end is explained."""

import os
import re

import pytest

from hvlike.transport.host.mpi_library import FILE_NAMES, advice_on, functions_of, install_hint, load_mpi

LIBRARIES = [
    "libmpi.so.40",
    "libmpi.so.12.1.8",
    "libmpich.so.12",
    "libmpi_abi.so.0",
    "libmpi_cray.so.12",
    "libmpi_gnu_123.so.12",
    "libmpi_nvidia.so.12",
    "libmpi_amd.so.12",
    "libmpi_ibm.so.3",
]
OTHERS = ["libmpi_gtl_hsa.so.0", "libmpi_mpifh.so.40", "libmpi_cxx.so.40", "libmpifort.so.12", "libmpicxx.so.12"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_library_of_each_vendor(name: str) -> None:
    assert re.match(FILE_NAMES, name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_lies_beside_it(name: str) -> None:
    assert not re.match(FILE_NAMES, name)


def test_its_functions_are_found_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvlike.transport.host.mpi_library.mapped_files", lambda *parts: [])
    assert functions_of(load_mpi()).MPI_Finalize


def test_on_a_cray_the_hint_tells_how_to_build_mpi4py_and_the_order_of_imports() -> None:
    hint = install_hint({"CRAY_MPICH_DIR": "/opt/cray/pe/mpich/8.1.31"})
    assert "MPICC='cc -shared' pip install" in hint
    assert "from mpi4py import MPI" in hint
    assert "MPICC" not in install_hint({name: "" for name in os.environ if not name.startswith("CRAY")})


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked", "ENABLED=0"),
        ("MPICH ERROR: invalid MPICH_OFI_NIC_POLICY", "python -m hvlike run train.py"),
        ("No PMIx server was reachable, but a PMI1/2 was detected", "srun --mpi=pmix"),
    ],
)
def test_last_words_of_mpi_are_explained(words: str, advice: str) -> None:
    assert advice in advice_on(f"first\n{words}\nlast")
    assert advice_on("Segmentation fault") == ""
