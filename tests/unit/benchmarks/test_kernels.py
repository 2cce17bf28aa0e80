"""bench kernels: ratios of threads, tables and pictures of what was measured."""

from support.bench.some_conditions import CONDITIONS

from benchmarks.kernels import NUMPY, Result, as_text, panels

RESULT = Result(
    "float32", 4 << 20, {"hvlike, 1": [4e-3, 4e-3, 4e-3], "hvlike, 2": [2e-3, 3e-3, 2e-3], NUMPY: [3e-3] * 3}
)


def test_more_threads_are_compared_with_the_fewest() -> None:
    assert {name: ratio.of_medians for name, ratio in RESULT.ratios.items()} == {"hvlike, 2 / hvlike, 1": 0.5}
    text = as_text({**CONDITIONS, "usable": 2.0, "caches": "cold"}, [RESULT])
    assert "2 cores a rank" in text
    (row,) = [line for line in text.splitlines() if line.startswith("4 MiB")]
    assert row.endswith("0.50 [0.50, 0.62]")


def test_pictures_get_all_contestants() -> None:
    (panel,) = panels([RESULT])
    assert set(panel.series) == set(RESULT.seconds)
