"""transformers' models in float32, as plain functions on numpy arrays."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(folder: Path):
    """The model in a folder, in float32, with the plain attention and delta kernels."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def logits(model, tokens: np.ndarray, lengths=None) -> np.ndarray:
    """float32 logits `[B, L, V]`; `lengths` real tokens in each row, the rest padding on the right."""
    mask = None
    if lengths is not None:
        mask = torch.from_numpy((np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]).astype(np.int64))
    with torch.no_grad():
        return model(torch.from_numpy(tokens), attention_mask=mask, use_cache=False).logits.numpy()


def loss_gradients(model, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Mean next-token cross-entropy of a batch and its gradient by tensor name."""
    model.zero_grad()
    ids = torch.from_numpy(tokens)
    out = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
