"""The table of knobs: spellings, ranges, ranks that differ."""

import dataclasses

import pytest

from hvlike.config import SETTINGS, Config, Setting, differing, read_config, unknown_variables
from hvlike.errors import UsageError

SAMPLES = {
    "0 or 1": "1",
    "the path of a file": "some/file",
    "comma-separated numbers of cores, one for each rank of a node": "3,1",
}
WRONG = [
    ("CYCLE_TIME", "fast"),
    ("CYCLE_TIME", "-1"),
    ("CYCLE_TIME", "nan"),
    ("CYCLE_TIME", "inf"),
    ("FUSION_THRESHOLD", "64MB"),
    ("FUSION_THRESHOLD", "1.5"),
    ("FUSION_THRESHOLD", "-1"),
    ("CACHE_CAPACITY", "1e3"),
    ("AUTOTUNE", "yes"),
    ("AUTOTUNE_STEPS_PER_SAMPLE", "0"),
    ("STALL_CHECK_TIME_SECONDS", "0"),
    ("LOG_LEVEL", "loud"),
    ("THREAD_AFFINITY", "1,,2"),
    ("THREAD_AFFINITY", "-1"),
]


def sample(entry: Setting) -> str:
    """A value that is not the default."""
    if entry.default is True:
        return "0"
    if entry.kind.expected in SAMPLES:
        return SAMPLES[entry.kind.expected]
    return {"LOG_LEVEL": "error", "CUDA_PLANE": "staged", "GRADIENTS": "horovod"}.get(entry.name, "4321987")


def test_every_field_is_a_knob_with_a_name_of_its_own() -> None:
    assert list(SETTINGS) == [field.name for field in dataclasses.fields(Config)]
    assert len({entry.name for entry in SETTINGS.values()}) == len(SETTINGS)
    assert read_config({}) == Config()


@pytest.mark.parametrize("field", SETTINGS)
def test_every_knob_is_read_in_each_spelling(field: str) -> None:
    entry = SETTINGS[field]
    text = sample(entry)
    value = entry.kind.parse(text)
    assert value != entry.default
    for spelling in entry.spellings:
        assert getattr(read_config({spelling: text}), field) == value
    assert entry.horovod == (f"HOROVOD_{entry.name}" in entry.spellings)
    if not entry.horovod:
        assert read_config({f"HOROVOD_{entry.name}": text}) == Config()


@pytest.mark.parametrize(("name", "text"), WRONG)
@pytest.mark.parametrize("prefix", ["HVLIKE_", "HOROVOD_"])
def test_a_wrong_value_is_refused_with_name_value_and_what_was_expected(prefix: str, name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config({prefix + name: text})
    assert f"{prefix}{name}={text!r}: expected " in str(caught.value)


def test_an_empty_value_is_as_good_as_none() -> None:
    assert read_config({spelling: "" for entry in SETTINGS.values() for spelling in entry.spellings}) == Config()


def test_two_spellings_may_agree_but_not_differ() -> None:
    assert read_config({"HVLIKE_CYCLE_TIME": "1", "HOROVOD_CYCLE_TIME": "1.0"}).cycle_time == 1
    with pytest.raises(UsageError, match="HVLIKE_CYCLE_TIME=1 but HOROVOD_CYCLE_TIME=2: two spellings"):
        read_config({"HVLIKE_CYCLE_TIME": "1", "HOROVOD_CYCLE_TIME": "2"})


def test_ranks_that_differ_are_named_with_their_values() -> None:
    plain, other = Config(), Config(cycle_time=3.0)
    assert differing([plain] * 4) is None
    text = differing([plain, other, plain, other])
    assert text is not None
    assert "HVLIKE_CYCLE_TIME is 0.0 on ranks 0, 2, 3.0 on ranks 1, 3." in text
    overlapping = differing([plain, Config(overlap=True)])
    assert overlapping is not None
    assert "HVLIKE_OVERLAP is unset on rank 0, 1 on rank 1" in overlapping


def test_paths_and_cores_may_differ() -> None:
    assert differing([Config(), Config(timeline="mine", thread_affinity=(1,), log_level="debug")]) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HVLIKE_TIMELIN", "did you mean HVLIKE_TIMELINE?"),
        ("HVLIKE_STALL_CHECK_TIME", "did you mean HVLIKE_STALL_CHECK_TIME_SECONDS?"),
        ("HOROVOD_FUSION_THRESHOLDS", "did you mean HOROVOD_FUSION_THRESHOLD?"),
        # Horovod has no such setting, hvlike has.
        ("HOROVOD_OVERLAP", "did you mean HVLIKE_OVERLAP?"),
        ("HVLIKE_FOO", "docs/knobs.md"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_with_the_nearest(name: str, text: str) -> None:
    (said,) = unknown_variables({name: "1", "HVLIKE_CYCLE_TIME": "1", "PATH": "/", "HVLIKE_EMPTY": ""}).values()
    assert said.startswith(f"{name} is set, but there is no such setting: ")
    assert text in said


def test_variables_of_horovod_that_mean_nothing_here_are_not_called_misspelt() -> None:
    """Those of its build stay in the environment of many images."""
    names = "HOROVOD_GPU_OPERATIONS HOROVOD_WITH_PYTORCH HOROVOD_WITHOUT_GLOO HOROVOD_NCCL_HOME HOROVOD_CUDA_HOME "
    names += "HOROVOD_SPARK_START_TIMEOUT HOROVOD_BUILD_ARCH_FLAGS HOROVOD_CMAKE HOROVOD_ELASTIC HOROVOD_MPI"
    assert unknown_variables(dict.fromkeys(names.split(), "1")) == {}
