"""What a retrieval service accepts."""

import dataclasses

import gin


@gin.configurable
@dataclasses.dataclass(frozen=True)
class ServiceLimits:
    """Limits on requests, and how they are batched.

    Attributes:
      max_body_bytes: of a request; larger ones are refused while they arrive.
      body_timeout_s: a request's body must arrive within it.
      max_queries: per request.
      max_top_k: passages per query.
      default_top_k: when a request names none (Search-R1: 3).
      max_batch: queries searched together.
      max_wait_s: how long an idle worker waits for more queries after the first.
      workers: batches searched at once; FAISS has its own threads within each.
      max_pending_queries: queries that may wait; requests beyond are refused with 503.
      max_connections: concurrent connections; beyond, requests are refused with 503.
      shutdown_s: how long running requests may take after SIGTERM.
    """

    max_body_bytes: int = 1 << 20
    body_timeout_s: float = 10.0
    max_queries: int = 1024
    max_top_k: int = 100
    default_top_k: int = 3
    max_batch: int = 64
    max_wait_s: float = 0.002
    workers: int = 1
    max_pending_queries: int = 4096
    max_connections: int = 1024
    shutdown_s: int = 10
