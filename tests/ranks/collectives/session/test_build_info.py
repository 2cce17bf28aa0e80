"""What the installation says of itself is true, with and without init()."""

from types import ModuleType

import pytest
import torch

from hvlike.backends.cuda.nccl import describe

pytestmark = [pytest.mark.differs_by_ranks(2), pytest.mark.rests_on_mpi]


def test_mpi_carries_everything_and_nothing_else_does(hvd: ModuleType) -> None:
    assert hvd.mpi_built() is True
    assert hvd.mpi_enabled() is True
    for answer in (hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()):
        assert answer is False


def test_nccl_is_a_version_code(hvd: ModuleType) -> None:
    assert type(hvd.nccl_built()) is int
    assert bool(hvd.nccl_built()) == (not describe().missing)


def test_what_is_asked_of_torch(hvd: ModuleType) -> None:
    # ROCm's torch calls its devices "cuda" too, and one torch has one of them at most.
    assert hvd.cuda_built() == (torch.backends.cuda.is_built() and not hvd.rocm_built())
    assert not (hvd.cuda_built() and hvd.rocm_built())
    assert hvd._check_has_gpu() == (torch.cuda.device_count() > 0)


def test_the_job_answers_for_itself(hvd: ModuleType) -> None:
    assert hvd.is_homogeneous() == (hvd.local_size() * hvd.cross_size() == hvd.size())
    assert isinstance(hvd.mpi_threads_supported(), bool)


@pytest.mark.parametrize("name", ["torch", "horovod.torch", "hvlike"])
def test_the_extension_for_torch_is_there(hvd: ModuleType, name: str) -> None:
    assert hvd.extension_available(name)
    assert hvd.check_extension(name, "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None


@pytest.mark.parametrize("name", ["horovod.tensorflow", "mxnet", "keras"])
def test_other_extensions_are_not(hvd: ModuleType, name: str) -> None:
    assert not hvd.extension_available(name)
    with pytest.raises(ImportError, match=f"{name} has not been built"):
        hvd.check_extension(name, "HOROVOD_WITH_OTHER", __file__)
