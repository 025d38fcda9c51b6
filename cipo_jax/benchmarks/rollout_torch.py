"""Peers of the rollout benchmark: transformers on torch (CPU, float32), driven by `rollout.py`.

`reencode` runs a turn of 32 rollouts as people write it with `generate`: the whole context goes in again, rollouts sorted
by length, padded on the left. `cached` hands the same cache back to `generate` in every turn; what a row that ended
early left behind is masked. `decode` is one `generate` from a short prompt. Rows whose forced length is reached are
finished for `generate`, which goes on to the longest. Before the first part, the kinds of cache and of attention are
timed and the fastest is taken.
"""

import time
import warnings
from itertools import product

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, StoppingCriteria
from transformers.utils import logging

from cipo_jax.benchmarks.rollout_job import NORM_EPS, ROPE_THETA, SHAPES, Job, serve

CACHES, ATTENTION = ("dynamic", "static"), ("sdpa", "eager")


class _Lengths(StoppingCriteria):
    """Row `b` is finished `count[b]` tokens behind `start`."""

    def __init__(self, start: int, count: torch.Tensor):
        self.start, self.count = start, count

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - self.start >= self.count


class Transformers:
    """Parts of a job in transformers."""

    def __init__(self, job: Job, threads: int = 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        logging.set_verbosity_error()
        warnings.simplefilter("ignore", FutureWarning)  # `generate` renames its argument for the cache
        shape = SHAPES[job.shape]
        config = LlamaConfig(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["width"],
            num_hidden_layers=shape["depth"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            intermediate_size=shape["ffn"],
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            rms_norm_eps=NORM_EPS,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.job, self.lengths = job, torch.as_tensor(job.lengths)
        self.model = LlamaForCausalLM(config).eval()
        self.cache, self.sample = "dynamic", True

    def generate(self, ids, mask, count, cache=None):
        """One action of each row: all tokens so far, `[B, L + longest]`."""
        made = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=self.sample,
            temperature=1.0 if self.sample else None,
            top_k=0 if self.sample else None,
            max_new_tokens=int(count.max()),
            stopping_criteria=[_Lengths(ids.shape[1], count)],
            past_key_values=cache,
            cache_implementation="static" if cache is None and self.cache == "static" else None,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert made.shape[1] == ids.shape[1] + int(count.max()), (made.shape, ids.shape, count.max())
        return made

    def new_cache(self, places: int):
        """An empty cache for rows of up to `places` tokens."""
        if self.cache == "static":
            return StaticCache(self.model.config, max_cache_len=places)
        return DynamicCache(config=self.model.config)

    def reencode(self, turn: int, batch: int) -> int:
        """Turn `turn` of a sorted batch; the contexts are made up."""
        rows = self.job.batches(turn)[batch]
        context = torch.as_tensor(self.job.context(turn)[rows])
        longest = int(context.max())
        mask = (torch.arange(longest)[None] >= longest - context[:, None]).long()
        ids = torch.as_tensor(self.job.tokens(len(rows), longest)) * mask
        self.generate(ids, mask, self.lengths[rows, turn])
        return int(self.lengths[rows, turn].max())

    def cached(self, batch: int):
        """All turns of a batch. Returns the steps, and tokens and mask for a test."""
        rows = self.job.unsorted_batches()[batch]
        counts = self.lengths[rows]
        observation = torch.as_tensor(self.job.tokens(len(rows), self.job.observation))
        ids = torch.as_tensor(self.job.tokens(len(rows), self.job.prompt))
        mask = torch.ones_like(ids)
        columns = ids.shape[1] + int(counts.max(0).values.sum()) + self.job.turns * self.job.observation
        cache = self.new_cache(columns)
        for turn in range(self.job.turns + 1):
            start = ids.shape[1]
            ids = self.generate(ids, mask, counts[:, turn], cache)
            kept = torch.arange(ids.shape[1] - start)[None] < counts[:, turn, None]
            mask = torch.cat([mask, kept.long()], 1)
            if turn < self.job.turns:
                ids = torch.cat([ids, observation], 1)
                mask = torch.cat([mask, torch.ones_like(observation)], 1)
        return int(counts.max(0).values.sum()), ids, mask

    def decode(self) -> int:
        """One `generate` of a batch up to `keys` places."""
        ids = torch.as_tensor(self.job.tokens(self.job.slots, 8))
        steps = self.job.keys - ids.shape[1]
        self.generate(ids, torch.ones_like(ids), torch.full((len(ids),), steps))
        return steps

    def choose(self) -> dict:
        """Times each kind of cache and attention on a few tokens of rows halfway and keeps the fastest; seconds a step."""
        filled = self.job.places // 2
        ids = torch.as_tensor(self.job.tokens(self.job.slots, filled + 1))
        config = self.model.config
        past = torch.randn(self.job.slots, config.num_key_value_heads, filled, config.head_dim)
        seconds = {}
        for cache, attention in product(CACHES, ATTENTION):
            self.cache = cache
            self.model.set_attn_implementation(attention)
            taken = []
            for count in (2, 2, 10):  # the first is slower than the rest
                held = self.new_cache(self.job.places)
                for layer in range(config.num_hidden_layers):
                    held.update(past, past, layer)
                start = time.perf_counter()
                self.generate(ids, torch.ones_like(ids), torch.full((len(ids),), count), held)
                taken.append(time.perf_counter() - start)
            seconds[f"{cache} {attention}"] = (taken[2] - taken[1]) / 8
        self.cache, attention = min(seconds, key=seconds.get).split()
        self.model.set_attn_implementation(attention)
        return seconds


@torch.inference_mode()
def start(job: Job):
    """See `rollout_job.serve`."""
    peer = Transformers(job)
    tried = peer.choose()

    @torch.inference_mode()
    def do(part: str, *args: int) -> dict:
        begin = time.perf_counter()
        steps = getattr(peer, part)(*args)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "steps": int(np.ravel(steps[0] if isinstance(steps, tuple) else steps)[0])}

    return {"cache": peer.cache, "attention": peer.model.config._attn_implementation, "tried": tried}, do


if __name__ == "__main__":
    serve(start)
