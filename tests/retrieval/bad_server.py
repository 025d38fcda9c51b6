"""A retrieval server that misbehaves in chosen ways."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def _good(request):
    return [
        [{"document": {"id": str(i), "contents": f'"T{i}"\n{query}'}, "score": 1.0 - i} for i in range(request["topk"])]
        for query in request["queries"]
    ]


class Server:
    """An HTTP server that answers each request by the next of `behaviours` (the last one for ever).

    Attributes:
      requests: path and JSON body of each.
      served: by which behaviour each was answered.
      url: where it listens.
    """

    def __init__(self, *behaviours):
        self.behaviours, self.release = list(behaviours), threading.Event()
        self.requests, self.served = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests.append((self.path, json.loads(body)))
                kind = outer.next_behaviour()
                outer.served.append(kind)
                getattr(outer, kind)(self, outer.requests[-1][1])

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # clients that hang up are part of these tests

        self._server = Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def next_behaviour(self):
        return self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]

    def close(self):
        self.release.set()
        self._stop()

    def _stop(self):
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def _reply(handler, status, body, headers=()):
        handler.send_response(status)
        for name, value in (("content-length", str(len(body))), *headers):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def good(self, handler, request):
        self._reply(handler, 200, json.dumps({"result": _good(request)}).encode())

    def plain(self, handler, request):
        result = [[item["document"] for item in items] for items in _good(request)]
        self._reply(handler, 200, json.dumps({"result": result}).encode())

    def error500(self, handler, _):
        self._reply(handler, 500, b"boom")

    def busy503(self, handler, _):
        self._reply(handler, 503, b"{}", [("retry-after", "1")])

    def refused422(self, handler, _):
        self._reply(handler, 422, b'{"detail": "no"}')

    def redirect(self, handler, _):
        self._reply(handler, 302, b"", [("location", "http://127.0.0.1:1/")])

    def html(self, handler, _):
        self._reply(handler, 200, b"<html><body>It works!</body></html>")

    def cut(self, handler, request):
        self._reply(handler, 200, json.dumps({"result": _good(request)}).encode()[:-9])

    def short(self, handler, _):
        self._reply(handler, 200, b'{"result": []}')

    def binary(self, handler, _):
        self._reply(handler, 200, b"\xff\xfe\x00" * 5)

    def deep(self, handler, _):
        self._reply(handler, 200, b'{"result":' + b"[" * 100_000)

    def wrong_types(self, handler, _):
        self._reply(handler, 200, b'{"result": [[{"document": {"id": 1, "contents": 5}, "score": "x"}]]}')

    def huge(self, handler, _):
        self._reply(handler, 200, b"x" * 300_000)

    def hang_up(self, handler, _):
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"result": [')
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)

    def drop(self, handler, _):
        handler.connection.shutdown(socket.SHUT_RDWR)

    def die(self, handler, _):
        threading.Thread(target=self._stop).start()  # whoever connects from now on is refused
        self.drop(handler, _)

    def not_http(self, handler, _):
        handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    def silent(self, handler, _):
        self.release.wait(60)

    def trickle(self, handler, _):
        handler.send_response(200)
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not self.release.wait(0.05):  # each read succeeds, the answer never ends
            handler.wfile.write(b" ")
            handler.wfile.flush()
