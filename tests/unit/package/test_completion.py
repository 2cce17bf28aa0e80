"""What `dir(hvlike)` and a misspelt name show."""

import subprocess
import sys

import hvlike


def test_dir_has_the_public_names_and_modules_alone() -> None:
    shown = {name for name in dir(hvlike) if not name.startswith("_")}
    inner = {"errors", "integrations"}
    assert shown == {name for name in hvlike.__all__ if not name.startswith("_")} | inner
    assert hvlike.errors.UsageError is not None
    assert hvlike.integrations.__name__ == "hvlike.integrations"


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    command = [sys.executable, "-c", "import hvlike as hvd; hvd.allredcue"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "module 'hvlike' has no attribute 'allredcue'" in done.stderr
    assert "Did you mean: 'allreduce'?" in done.stderr
