"""Writes golden/bert: a tiny random BERT and what transformers (torch, float32) computes with it.

python tests/models/golden/write_bert.py        # needs torch
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertModel

FOLDER = Path(__file__).parent / "bert"


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=24, type_vocab_size=2,
    )  # fmt: skip
    model = BertModel(config).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1: make every weight count
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(FOLDER, safe_serialization=True)
    rng = np.random.default_rng(0)
    lengths = np.array([24, 7, 1, 12])
    ids = rng.integers(0, 50, (4, 24))
    mask = np.arange(24) < lengths[:, None]
    with torch.no_grad():
        hidden = model(torch.tensor(ids * mask), attention_mask=torch.tensor(mask).long()).last_hidden_state
        weights = torch.tensor(mask).unsqueeze(-1).float()
        mean = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))
        cls = hidden[:, 0]
    expected = {"ids": ids, "lengths": lengths, "hidden": hidden * weights, "mean": mean, "cls": cls}
    (FOLDER / "expected.json").write_text(json.dumps({k: np.asarray(v).tolist() for k, v in expected.items()}))


if __name__ == "__main__":
    main()
