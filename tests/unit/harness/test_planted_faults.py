"""The faults that scripts/fuzz plants still stand where hvlike can have them."""

import pytest
from support.fuzz.planted import PLANTS, Plant, planted


@pytest.mark.parametrize("fault", PLANTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Plant) -> None:
    assert not fault.missing()
    with planted(fault) as folder:
        for file, _, new in fault.changes:
            assert new in (folder / "hvlike" / file).read_text()
