"""Bad settings of a multi-process start are the user's errors; the start itself is tested in tests/launch."""

import pytest

from cipo_jax.distributed.start import initialise
from cipo_jax.errors import UserError

GOOD = {"CIPO_COORDINATOR": "127.0.0.1:1234", "CIPO_PROCESS_ID": "0", "CIPO_NUM_PROCESSES": "2"}


def test_one_process_needs_nothing():
    assert initialise({}) is False
    assert initialise({**GOOD, "CIPO_NUM_PROCESSES": "1"}) is False


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"CIPO_PROCESS_ID": ""}, "CIPO_PROCESS_ID is not set although CIPO_COORDINATOR is"),
        ({"CIPO_PROCESS_ID": "2"}, "CIPO_PROCESS_ID=2 is not below CIPO_NUM_PROCESSES=2"),
        ({"CIPO_PROCESS_ID": "-1"}, "CIPO_PROCESS_ID=-1 is not below"),
        ({"CIPO_NUM_PROCESSES": "two"}, "CIPO_NUM_PROCESSES='two' is not a whole number"),
        ({"CIPO_COORDINATOR": "localhost"}, "CIPO_COORDINATOR='localhost' is not host:port"),
    ],
)
def test_settings_that_make_no_sense_are_named(change, told):
    with pytest.raises(UserError, match=told):
        initialise({**GOOD, **change})
