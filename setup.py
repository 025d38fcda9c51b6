"""Packaging of cipo_jax. Tool settings (ruff, pytest) are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"

SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
BM25 = ["bm25s>=0.2.6"]
GGUF = ["gguf>=0.17"]
PARQUET = ["pyarrow>=17"]

setup(
    name="cipo_jax",
    version="0.1.0",
    description="Train and audit LLM search agents whose next step depends on the evidence they retrieved, in JAX.",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["cipo_jax", "cipo_jax.*"]),
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.1",
        "faiss-cpu>=1.9",
        "flax>=0.12",
        "gin-config>=0.5",
        "grain>=0.2.10",
        "httpx>=0.27",
        "jinja2>=3.1",  # chat templates; transformers does not require it
        "jax>=0.10",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.12",
        "rich>=13.7",
        "safetensors>=0.5",
        "scipy>=1.13",
        "tensorstore>=0.1.84",
        # Tokenizers, chat templates and configs only: cipo_jax never imports torch.
        "transformers>=5.0",
    ],
    extras_require={
        "serve": SERVE,
        "bm25": BM25,
        "gguf": GGUF,
        "parquet": PARQUET,
        "tensorboard": ["tensorboardX>=2.6"],
        "wandb": ["wandb>=0.19"],
        "test": [
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.115",
            "ruff>=0.9",
            "nbclient>=0.10",
            "nbformat>=5.10",
            "ipykernel>=6.29",
            *SERVE,
            *BM25,
            *GGUF,
            *PARQUET,
        ],
        # Live comparison with transformers' own models. Install the torch build you want first (a CPU one will do).
        "parity": ["torch>=2.4"],
    },
)
