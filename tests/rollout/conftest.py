"""Makes `tiny_world` importable."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_world import build_setting


@pytest.fixture(scope="session")
def setting():
    """`tiny_world.build_setting`."""
    return build_setting
