"""Settings that must be made before JAX is imported: eight simulated CPU devices, and enough threads for them."""

import os
import signal
from pathlib import Path

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's pool has NPROC threads; host callbacks of simulated devices block some, and fewer than two a device deadlock.
os.environ["NPROC"] = str(max(2 * DEVICES, int(os.environ.get("NPROC", 0))))
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f),
        f"--xla_force_host_platform_device_count={DEVICES}",
    ]
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Behind `&` the shell has the tests ignore Ctrl-C; the programs they start shall hear it all the same.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402 (after the settings it reads)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests run in."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `../shared` of real questions and passages (or CIPO_SHARED); tests that need it skip without."""
    path = Path(os.environ.get("CIPO_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip("../shared is not here (set CIPO_SHARED to its path)")
    return path


@pytest.fixture
def clean_gin():
    """A gin configuration without bindings, before and after the test."""
    import gin

    gin.clear_config()
    yield gin
    gin.clear_config()
