"""Sizes and times as people write and read them."""

import argparse

import pytest

from hvlike.bench.harness.report import format_seconds, format_size, parse_size, parse_sizes, table


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KiB", 65536), ("64k", 65536), ("1.5 MiB", 1572864), ("2GB", 2 << 30), ("0", 0), ("8B", 8)],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 TiB", "1,5MiB", "many"])
def test_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size; write 4096, 64KiB or 25MiB"):
        parse_size(text)


def test_lists() -> None:
    assert parse_sizes("1KiB,2MiB") == [1024, 2 << 20]


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (1024, "1 KiB"), (25 << 20, "25 MiB"), (3 << 29, "1.5 GiB")])
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2 s"), (0.00123, "1.23 ms"), (5e-6, "5 us"), (1e-7, "0.1 us")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_table_is_aligned() -> None:
    assert table(["size", "a"], [["1 KiB", "3"], ["x", "12"]]) == "size    a\n1 KiB   3\nx      12"
