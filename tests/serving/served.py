"""A server on the loopback interface, and a client of it. To import it skips a test where its packages are missing."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

completions = pytest.importorskip("ejkernel.serving.completions", reason="starlette is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

SECONDS = 60  # timeout, longer than any test takes


class Server:
    """A running server, and requests to it."""

    def __init__(self, port, worker):
        self.port, self.worker = port, worker

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def call(self, method, path, body=None):
        """(status, JSON, headers) of a response."""
        connection = self.connect()
        connection.request(method, path, body if isinstance(body, (bytes, type(None))) else json.dumps(body))
        answer = connection.getresponse()
        sent = answer.status, json.loads(answer.read()), dict(answer.getheaders())
        connection.close()
        return sent

    def complete(self, **body):
        return self.call("POST", "/v1/completions", body)[:2]

    def text(self, **body):
        status, answer = self.complete(**body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def events(self, **body):
        """The data of the events of a stream."""
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("content-type").startswith("text/event-stream")
        *events, last = answer.read().decode().strip().split("\n\n")
        connection.close()
        assert last == "data: [DONE]"
        return [event.removeprefix("data: ") for event in events]

    def pool_is_free(self):
        deadline = time.monotonic() + SECONDS
        while self.worker.open or not self.worker.engine.idle:
            assert time.monotonic() < deadline, "requests are left"
            time.sleep(0.01)
        return self.worker.engine.scheduler.pool.used == 0


@contextmanager
def serving(worker, most_bytes=4096):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = completions.Completions(worker, "small", most_bytes).application()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listening]))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield Server(listening.getsockname()[1], worker)
        finally:
            server.should_exit = True
            thread.join(SECONDS)
    assert not thread.is_alive() and not worker._thread.is_alive()
