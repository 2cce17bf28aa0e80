"""The table of Horovod's modules, the importer's refusals, and what stands in for what hvlike has not."""

import inspect
import re
import sys
from importlib import import_module

import pytest
import torch

from hvlike.errors import UsageError
from hvlike.horovod import command, stand_ins
from hvlike.horovod.importer import MODULES, HorovodImporter


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_table_is_there(module: str) -> None:
    for place, names in MODULES[module].items():
        missing = [name for name in names.split() if not hasattr(import_module(place), name)]
        assert not missing, place


def test_every_module_has_its_parent_in_the_table() -> None:
    assert {name.rpartition(".")[0] for name in MODULES} - {""} <= set(MODULES)


@pytest.mark.parametrize(
    ("module", "missing", "text"),
    [
        ("horovod.tensorflow", "horovod.tensorflow", "Programs of other frameworks need Horovod itself."),
        ("horovod.keras", "horovod.keras", "Programs of other frameworks need Horovod itself."),
        ("horovod.mxnet", "horovod.mxnet", "Programs of other frameworks need Horovod itself."),
        ("horovod.spark.torch", "horovod.spark", "Start the ranks with mpirun, a scheduler, or hvlike.run."),
        ("horovod.ray", "horovod.ray", "Start the ranks with mpirun, a scheduler, or hvlike.run."),
        ("horovod.runner.launch", "horovod.runner.launch", "Start the ranks with mpirun, a scheduler, or hvlike.run."),
        ("horovod.torch.mpi_lib_v2", "horovod.torch.mpi_lib_v2", "The rest of horovod.torch is the inside of Horovod."),
        ("horovod.torch.mpi_ops.inner", "horovod.torch.mpi_ops.inner", "The rest of horovod.torch is the inside of"),
    ],
)
def test_an_import_of_what_is_not_served_says_what_is(
    module: str, missing: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(sys, "meta_path", [HorovodImporter(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=re.escape(text)) as raised:
        import_module(module)
    assert f"hvlike stands in for Horovod here and has no '{missing}'; it serves " in str(raised.value)
    assert raised.value.name == missing


def test_other_modules_are_left_to_other_importers() -> None:
    assert HorovodImporter().find_spec("horovodish") is None
    assert HorovodImporter().find_spec("torch") is None


@pytest.mark.parametrize("option", ["min_num_proc", "host_discovery_script", "ssh_port", "executable"])
def test_options_of_run_that_cannot_be_served_are_refused_by_name(option: str) -> None:
    with pytest.raises(UsageError, match=f"horovod.run: {option}=1 is not served by hvlike: "):
        stand_ins.run(print, num_proc=2, **{option: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        stand_ins.run(print, colour="red")


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == command.main(["-m"]) == 2
    assert "usage: mpirun -n 4 python -m hvlike horovod [-m MODULE | SCRIPT]" in capsys.readouterr().err
    assert command.main(["-h"]) == 0
    assert "usage" in capsys.readouterr().out


def test_compressors_are_classes_with_static_methods() -> None:
    tensor = torch.tensor([1.0, 2.0])
    small, dtype = stand_ins.FP16Compressor.compress(tensor)
    assert small.dtype is torch.float16
    assert stand_ins.FP16Compressor.decompress(small, dtype).dtype is torch.float32
    assert stand_ins.NoneCompressor.compress(tensor)[0] is tensor
    assert all(inspect.isclass(each) for each in (stand_ins.FP16Compressor, stand_ins.NoneCompressor))


def test_small_helpers_do_what_they_do_in_horovod() -> None:
    assert stand_ins.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [each for each in range(9) if stand_ins.num_rank_is_power_2(each)] == [1, 2, 4, 8]
    assert stand_ins.is_iterable("ab")
    assert not stand_ins.is_iterable(3)
