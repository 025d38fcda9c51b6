"""Makes `tiny_world`, `edge_world` and `plain` importable."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "protocols")]

from tiny_world import build_setting  # noqa: E402


@pytest.fixture(scope="session")
def setting():
    """`tiny_world.build_setting`."""
    return build_setting
