"""Which backend serves CUDA tensors follows from what the ranks say, and is the same on all of them."""

import pytest

from hvlike.backends.cuda.opening import BackendChoice, DeviceFacts, choose_backend, why_not_nccl
from hvlike.errors import LaunchError

A, B = DeviceFacts("one", "gpu-a", 22703, ""), DeviceFacts("one", "gpu-b", 22703, "")
FAR = DeviceFacts("two", "gpu-a", 22703, "")
BARE = DeviceFacts("one", "gpu-c", 0, "CuPy is not installed: pip install hvlike[cuda12]")
OLD = DeviceFacts("one", "gpu-d", 21801, "")


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        ([A, B], "auto", "nccl"),
        ([A, FAR], "auto", "nccl"),
        ([A, B], "staged", "staged"),
        ([A, A], "auto", "staged"),
        ([A, BARE], "auto", "staged"),
        ([A, OLD], "auto", "staged"),
        ([A], "auto", "solo"),
        ([BARE], "staged", "solo"),
        ([A], "nccl", "nccl"),
        ([A, B], "nccl", "nccl"),
    ],
)
def test_the_backend(facts: list[DeviceFacts], wanted: str, expected: str) -> None:
    assert choose_backend(facts, range(len(facts)), wanted).backend == expected


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([A, B, A], ["ranks 4 and 6 on one share the GPU gpu-a", "3 ranks use 2", "torch.cuda.set_device"]),
        ([A, BARE], ["rank 5 has no NCCL", "pip install hvlike[cuda12]"]),
        ([A, OLD], ["different versions", "21801 on rank 5", "22703 on rank 4"]),
    ],
)
def test_the_reason_names_ranks_and_what_to_do(facts: list[DeviceFacts], words: list[str]) -> None:
    ranks = [4, 5, 6][: len(facts)]
    reason = why_not_nccl(facts, ranks)
    assert all(word in reason for word in words), reason
    assert choose_backend(facts, ranks, "auto") == BackendChoice("staged", reason)
    with pytest.raises(LaunchError) as caught:
        choose_backend(facts, ranks, "nccl")
    assert reason in str(caught.value)


def test_cupy_that_cannot_serve_is_unexpected() -> None:
    broken = DeviceFacts("one", "gpu-e", 0, "CuPy 13.0 is installed, but it finds no libnccl.so", "13.0")
    assert choose_backend([A, broken], range(2), "auto").is_unexpected
    assert not choose_backend([A, BARE], range(2), "auto").is_unexpected
    assert not choose_backend([broken, broken], range(2), "staged").is_unexpected
