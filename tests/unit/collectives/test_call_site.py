"""The place of a call is the user's line, also where it is asked for later."""

import sys

from hvlike.collectives.requests.request import CallSite, find_call_site


def test_it_is_the_line_of_the_call() -> None:
    place, line = find_call_site(0), sys._getframe().f_lineno
    assert str(place) == f"{__file__}:{line}"


def test_it_is_that_of_each_call_in_a_loop_over_lines() -> None:
    first = sys._getframe().f_lineno
    places: list[CallSite] = [
        find_call_site(0),
        find_call_site(0),
    ]
    assert [str(each) for each in places] == [f"{__file__}:{first + 2}", f"{__file__}:{first + 3}"]
