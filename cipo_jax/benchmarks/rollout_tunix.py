"""Peer of the rollout benchmark: Tunix's sampler (PyPI `google-tunix`, its own environment), driven by `rollout.py`.

Each turn of 32 rollouts is prefilled anew, sorted by length and padded on the left, as its `Sampler` is called by an agent
loop. There is a sampler per batch, so that attention reads no more places than it needs, and the loop is told to
end with the longest row.
"""

import dataclasses
import time

import jax
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig

from cipo_jax.benchmarks.rollout_job import NORM_EPS, ROPE_THETA, SHAPES, Job, serve


class _Ids:
    """A tokenizer for text that is numbers already."""

    def encode(self, text: str) -> list[int]:
        return [int(x) for x in text.split()]

    def decode(self, ids) -> str:
        return ""

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


class _Forced(Sampler):
    """Ends after `steps` tokens; only the size of its buffers is fixed when it compiles."""

    steps = 1

    def init_sample_state(self, all_input_ids, *args, **kwargs):
        state = super().init_sample_state(all_input_ids, *args, **kwargs)
        return dataclasses.replace(state, total_sampling_steps=all_input_ids.shape[1] + self.steps)


def start(job: Job):
    """See `rollout_job.serve`."""
    shape = SHAPES[job.shape]
    config = ModelConfig(
        num_layers=shape["depth"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["width"],
        hidden_dim=shape["ffn"],
        num_heads=shape["heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["kv_heads"],
        rope_theta=int(ROPE_THETA),
        norm_eps=NORM_EPS,
        weight_tying=True,
    )
    model = Llama3(config, rngs=nnx.Rngs(0))
    lengths, longest = job.lengths, int(job.lengths.max())
    samplers: dict[tuple[int, int], tuple[_Forced, int]] = {}

    def run(turn: int, batch: int, steps: int | None = None) -> int:
        rows = job.batches(turn)[batch]
        context = job.context(turn)[rows]
        if (turn, batch) not in samplers:
            prompt = int(-(-context.max() // 32) * 32)
            cache = CacheConfig(prompt + longest, shape["depth"], shape["kv_heads"], shape["head_dim"])
            samplers[turn, batch] = _Forced(model, _Ids(), cache), prompt
            run(turn, batch, 1)  # compiles
        sampler, prompt = samplers[turn, batch]
        sampler.steps = steps or int(lengths[rows, turn].max())
        tokens = job.tokens(len(rows), int(context.max()))
        texts = [" ".join(map(str, t[:n])) for t, n in zip(tokens, context, strict=True)]
        out = sampler(
            texts,
            max_generation_steps=longest,
            max_prompt_length=prompt,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[-1],
            seed=turn,
        )
        assert np.asarray(out.tokens[0]).shape == (longest,)
        return sampler.steps

    def do(part: str, turn: int, batch: int) -> dict:
        """`prepare` compiles what `reencode` runs."""
        if part == "prepare":
            return {"steps": run(turn, batch, 1)}
        begin = time.perf_counter()
        steps = run(turn, batch)
        return {"seconds": time.perf_counter() - begin, "steps": steps}

    return {"jax": jax.__version__}, do


if __name__ == "__main__":
    serve(start)
