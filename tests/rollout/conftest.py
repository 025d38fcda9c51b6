import pytest
from tiny_world import build_setting


@pytest.fixture(scope="session")
def setting():
    """`tiny_world.build_setting`."""
    return build_setting
