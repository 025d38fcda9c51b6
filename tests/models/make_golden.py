"""Writes `golden/decoder_*.npz`, transformers' logits and gradients on `random_checkpoints`. Needs torch.

python tests/models/make_golden.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parity")]

import random_checkpoints as checkpoints  # noqa: E402
import reference  # noqa: E402


def main():
    for name, hf in checkpoints.CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = reference.load(checkpoints.write(Path(folder), hf))
            arrays = {}
            for length in checkpoints.LENGTHS:
                logits = reference.logits(model, checkpoints.tokens(length))
                arrays[f"logits_{length}"] = logits[:, checkpoints.places(length)]
                arrays[f"scale_{length}"] = np.abs(logits).max()
            loss, gradients = reference.loss_gradients(model, checkpoints.tokens(checkpoints.GRADIENT_LENGTH))
            arrays["loss"] = np.float32(loss)
            for tensor, gradient in gradients.items():
                arrays[f"grad/{tensor}"] = checkpoints.sampled(gradient)
        path = HERE / "golden" / f"decoder_{name}.npz"
        np.savez_compressed(path, **arrays)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
