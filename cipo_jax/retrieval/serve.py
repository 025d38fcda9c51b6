"""Runs the retrieval service until SIGTERM or Ctrl-C."""

import signal
import socket
import threading

import gin

from cipo_jax.errors import UserError
from cipo_jax.retrieval.limits import ServiceLimits
from cipo_jax.retrieval.retriever import Retriever


@gin.configurable
def serve_index(
    retriever: Retriever = gin.REQUIRED,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: ServiceLimits | None = None,
) -> None:
    """Serves a retriever over HTTP; see `service.create_app` for the routes.

    On SIGTERM no new connections are taken and running requests are finished.

    Args:
      retriever: answers queries; one search is made before the port opens, so that programs are compiled.
      host: the address to bind; loopback unless told otherwise. There is no authentication.
      port: 0 picks a free one.
      limits: on requests and batches.
    """
    try:
        import uvicorn

        from cipo_jax.retrieval.service import create_app
    except ImportError as error:
        raise UserError(f"serving needs {error.name}; pip install 'cipo_jax[serve]'") from None
    limits = limits or ServiceLimits()
    retriever.retrieve(["warm up"], 1)
    corpus = getattr(retriever, "corpus", None)
    rows = len(corpus) if corpus is not None else None
    listener = _bind(host, port)
    config = uvicorn.Config(
        create_app(retriever, rows, limits),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=limits.shutdown_s,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=30,
        lifespan="on",
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once it has stopped; without a handler that would end the process with -15.
        signal.signal(signal.SIGTERM, lambda *_: None)
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {rows if rows is not None else 'a'} passages on http://{shown}:{listener.getsockname()[1]}",
        flush=True,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
    print("stopped", flush=True)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port} ({error}); choose another serve_index.host or port") from None
    return listener
