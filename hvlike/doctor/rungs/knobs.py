"""The environment variables that hvlike reads, and those of Horovod that it does not."""

from __future__ import annotations

from hvlike.doctor.case import Case
from hvlike.doctor.finding import Finding, conclude, fail, warn


def judge(case: Case) -> Finding:
    """Whether init() takes them."""
    surroundings = case.me.surroundings
    remarks = []
    if surroundings.wrong_knob is not None:
        remarks.append(fail(surroundings.wrong_knob, "docs/knobs.md has the names and values of all."))
    for name, reason in surroundings.ignored_knobs:
        remarks.append(warn(f"{name} is ignored: {reason}", f"Unset {name}."))
    return conclude([] if remarks else ["every HVLIKE_ and HOROVOD_ variable that is set is known"], remarks)
