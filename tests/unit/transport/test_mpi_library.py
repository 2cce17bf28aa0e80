"""MPI's shared object is known whatever it is called, its last words are explained, and its limits are known."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hvlike.transport.host import mpi_library
from hvlike.transport.host.mpi_library import (
    EAGER_LIMIT,
    FILE_NAMES,
    advice_on,
    eager_bytes,
    functions_of,
    install_hint,
    load_mpi,
)

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


@pytest.mark.parametrize("name", LIBRARIES + OTHERS)
def test_the_library_of_each_vendor_is_told_from_what_lies_beside_it(name: str) -> None:
    assert bool(re.match(FILE_NAMES, name)) == (name in LIBRARIES)


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


OPEN_MPI: Any = SimpleNamespace(Get_library_version=lambda: "Open MPI v5.0.11, package: Open MPI\0")
MPICH: Any = SimpleNamespace(Get_library_version=lambda: "MPICH Version: 4.3.2\nMPICH Release date: 2025\n")


@pytest.mark.parametrize(
    ("setting", "limit"),
    [({EAGER_LIMIT: "262144"}, 256 << 10), ({}, 64 << 10), ({EAGER_LIMIT: "256k"}, 64 << 10)],
    ids=["as set", "what Open MPI takes", "what Open MPI does not read"],
)
def test_open_mpi_counts_its_headers(setting: dict[str, str], limit: int) -> None:
    assert limit - (8 << 10) < eager_bytes(OPEN_MPI, setting) < limit


@pytest.mark.parametrize(
    ("setting", "expected"), [("1024", 0), ("0", 0), (str(1 << 30), eager_bytes(OPEN_MPI, {EAGER_LIMIT: "262144"}))]
)
def test_limits_far_from_these_do_not_rule(setting: str, expected: int) -> None:
    assert eager_bytes(OPEN_MPI, {EAGER_LIMIT: setting}) == expected


def test_of_another_library_it_is_not_known() -> None:
    assert eager_bytes(MPICH, {EAGER_LIMIT: "262144"}) == 0


@pytest.mark.parametrize(
    ("free", "size", "rank", "warns"),
    [
        (0, 64, "0", True),
        (3000, 65536, "0", True),
        (3000, 65536, "1", False),
        (9000, 65536, "0", False),
        (0, 0, "0", False),
    ],
)
def test_a_full_shared_memory_is_said_by_one_rank_of_the_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, size: int, rank: str, warns: bool
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", rank)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=size, f_frsize=1024))
    mpi_library.warn_if_shm_full("/")
    assert (f"/ has {free} KiB free of {size} KiB" in caplog.text) is warns
