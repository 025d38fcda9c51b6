"""Text embeddings by a BERT encoder: tokenise, sort into length buckets, encode data-parallel."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import Tokenizer

from cipo_jax.errors import UserError
from cipo_jax.models import bert

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@gin.configurable
@dataclasses.dataclass(frozen=True)
class EncoderSpec:
    """How texts become vectors. The defaults are all-MiniLM-L6-v2's; E5 sets both prefixes.

    Attributes:
      query_prefix: written before every query (`query: ` for E5).
      passage_prefix: written before every passage (`passage: ` for E5).
      pooling: `mean` over the tokens, or `cls`.
      normalise: scale vectors to unit length, so that the inner product is the cosine.
      max_tokens: texts are cut here, special tokens included.
    """

    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalise: bool = True
    max_tokens: int = 256


@gin.configurable
class BertEmbedder:
    """An `Embedder` made of BERT weights.

    Texts are sorted by length and padded to a multiple of `bucket` tokens, so that at most `max_tokens / bucket`
    programs are compiled. Batches are always full (padded with empty texts): the bits of a query's vector depend on
    its own text alone, and the bits of a passage's on the list it is embedded with.

    Args:
      path: folder with `config.json`, `model.safetensors` and `tokenizer.json`.
      spec: prefixes, pooling and length.
      batch: passages per device and step.
      query_batch: queries per device and step. Few, since searches come a few at a time.
      bucket: passages are padded to a multiple of this many tokens; queries to this times a power of two.
      dtype: `float32` or `bfloat16`, of weights and activations.
      platform: JAX platform to run on; None is the default one. A retriever that is called from inside a compiled
        rollout must run on `cpu`: on an accelerator its program would wait for the rollout's, which waits for it.
      max_devices: local devices that share each batch; None takes all of them.
    """

    def __init__(
        self,
        path: str,
        spec: EncoderSpec | None = None,
        batch: int = 32,
        query_batch: int = 8,
        bucket: int = 16,
        dtype: str = "float32",
        platform: str | None = None,
        max_devices: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise UserError(f"BertEmbedder.dtype={dtype!r} is not one of {', '.join(DTYPES)}")
        folder = Path(path)
        self.spec = spec or EncoderSpec()
        self.config = bert.BertConfig.from_file(folder / "config.json")
        if not 2 < self.spec.max_tokens <= self.config.max_position_embeddings:
            raise UserError(
                f"EncoderSpec.max_tokens={self.spec.max_tokens} must lie in 3..{self.config.max_position_embeddings}, "
                "the positions of this encoder"
            )
        self.dim = self.config.hidden_size
        self.batch, self.query_batch, self.bucket, self.dtype = batch, query_batch, bucket, dtype
        self._folder = folder
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json", self.spec.max_tokens)
        try:
            self._devices = jax.local_devices(backend=platform)[:max_devices]
        except RuntimeError as error:
            raise UserError(f"BertEmbedder.platform={platform!r} is not to be had ({error})") from None
        mesh = Mesh(np.array(self._devices), ("data",))
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        params = bert.load_bert(folder, self.config)
        self._params = jax.device_put(jax.tree.map(lambda a: a.astype(DTYPES[dtype]), params), everywhere)
        self._programs: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._encode = jax.jit(functools.partial(_encode, config=self.config, spec=self.spec), out_shardings=self._rows)

    @functools.cached_property
    def fingerprint(self) -> dict[str, object]:
        """All that the bits of passage embeddings depend on besides texts, JAX version and hardware."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            with open(self._folder / name, "rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return {
            "weights": digest.hexdigest(),
            "batch": self.batch * len(self._devices),
            "bucket": self.bucket,
            "dtype": self.dtype,
            **dataclasses.asdict(self.spec),
        }

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        out = np.zeros((len(texts), self.dim), np.float32)
        buckets: dict[int, list[int]] = {}
        ids = self.tokenise([self.spec.query_prefix + text for text in texts])
        for i, text_ids in enumerate(ids):
            buckets.setdefault(next(n for n in self._query_lengths() if n >= len(text_ids)), []).append(i)
        step = self.query_batch * len(self._devices)
        for length, members in sorted(buckets.items()):
            for start in range(0, len(members), step):
                chosen = members[start : start + step]
                _collect(out, chosen, self._run([ids[i] for i in chosen], step, length))
        return out

    def warm_up(self) -> None:
        for length in self._query_lengths():
            self._run([[0]], self.query_batch * len(self._devices), length).block_until_ready()

    def _query_lengths(self) -> Iterator[int]:
        """The lengths that queries are padded to, ascending."""
        length = self.bucket
        while length < self.spec.max_tokens:
            yield length
            length *= 2
        yield self.spec.max_tokens

    def embed_passages(self, texts: Sequence[str]) -> np.ndarray:
        return self.embed_ids(self.tokenise_passages(texts))

    def tokenise_passages(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of prefixed passages, special tokens included."""
        return self.tokenise([self.spec.passage_prefix + text for text in texts])

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of texts; unpaired surrogates become `?`."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(clean)]

    def embed_ids(self, ids: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Embeds tokenised texts: `[len(ids), dim]` float32. `progress` is told how many are done after every batch."""
        out = np.zeros((len(ids), self.dim), np.float32)
        by_length = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        step = self.batch * len(self._devices)
        running: list[tuple[list[int], jax.Array]] = []
        done = 0
        # The longest first: what does not fit in memory fails at once, and the time left is not promised too short.
        for start in reversed(range(0, len(by_length), step)):
            chosen = by_length[start : start + step]
            length = min(-(-len(ids[chosen[-1]]) // self.bucket) * self.bucket, self.spec.max_tokens)
            running.append((chosen, self._run([ids[i] for i in chosen], step, length)))
            if len(running) > 2:  # two batches queued keep an accelerator busy
                done += _collect(out, *running.pop(0))
                if progress:
                    progress(done)
        for members, vectors in running:
            _collect(out, members, vectors)
        return out

    def _run(self, ids: Sequence[Sequence[int]], rows: int, length: int) -> jax.Array:
        padded, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        for i, text_ids in enumerate(ids):
            padded[i, : len(text_ids)], lengths[i] = text_ids, len(text_ids)
        ids_BL, lengths_B = jax.device_put((padded, lengths), self._rows)
        return self._program(rows, length)(self._params, ids_BL, lengths_B)

    def _program(self, rows: int, length: int) -> jax.stages.Compiled:
        # Kept here and not by jit, which compiles anew inside a host callback, where another default device is set.
        if (rows, length) not in self._programs:
            ids_BL = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=self._rows)
            lengths_B = jax.ShapeDtypeStruct((rows,), np.int32, sharding=self._rows)
            self._programs[rows, length] = self._encode.lower(self._params, ids_BL, lengths_B).compile()
        return self._programs[rows, length]


def _collect(out: np.ndarray, members: list[int], vectors: jax.Array) -> int:
    out[members] = np.asarray(vectors)[: len(members)]
    return len(members)


def _encode(params, ids_BL, lengths_B, *, config: bert.BertConfig, spec: EncoderSpec) -> jax.Array:
    mask_BL = jnp.arange(ids_BL.shape[1])[None] < lengths_B[:, None]
    hidden = bert.bert_hidden(params, config, ids_BL, mask_BL)
    return bert.pool(hidden, mask_BL, spec.pooling, spec.normalise)


def _load_tokenizer(path: Path, max_tokens: int) -> Tokenizer:
    if not path.is_file():
        raise UserError(f"encoder tokenizer {str(path)!r} does not exist; give a folder with tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return tokenizer
