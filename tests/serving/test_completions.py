"""The server as clients see it, on the loopback interface: answers, streams, errors, and clients that disconnect."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ejkernel.serving import Engine, Limits, Sampling
from ejkernel.serving.text import decode, encode
from ejkernel.serving.worker import Worker

from .served import SECONDS, serving

LIMITS = Limits(pages=24, page_size=8, sequences=4, length=64, buckets=(16,))


@pytest.fixture(scope="module")
def engine(decoder, weights):
    engine = Engine(decoder, weights, LIMITS)
    engine.compile()
    return engine


@pytest.fixture(scope="module")
def server(engine):
    with serving(Worker(engine, most=32)) as server:
        yield server


@pytest.fixture(scope="module")
def text(plain):
    """The greedy continuation of a text."""
    return lambda prompt, count: decode(plain(encode(prompt), count))


PROMPT = "".join(map(chr, range(20, 31)))


def test_the_models_are_listed(server):
    status, answer, _ = server.call("GET", "/v1/models")
    assert status == 200 and [model["id"] for model in answer["data"]] == ["small"]


def test_a_completion_is_the_greedy_text(server, text):
    status, answer = server.complete(model="small", prompt=PROMPT, max_tokens=9, temperature=0)
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "small"
    assert answer["choices"] == [dict(index=0, text=text(PROMPT, 9), logprobs=None, finish_reason="length")]
    assert answer["usage"] == dict(prompt_tokens=11, completion_tokens=9, total_tokens=20)
    assert server.text(prompt=encode(PROMPT), max_tokens=9, temperature=0, n=1, stop=None) == text(PROMPT, 9)


def test_an_end_token_is_no_part_of_the_text(server, text):
    whole = text(PROMPT, 9)
    status, answer = server.complete(prompt=PROMPT, max_tokens=9, temperature=0, stop_token_ids=[ord(whole[4])] * 2)
    choice = answer["choices"][0]
    assert status == 200 and choice["text"] == whole[: whole.index(whole[4])] and choice["finish_reason"] == "stop"


def test_a_stream_brings_the_same_text_token_by_token(server, text):
    events = server.events(prompt=PROMPT, max_tokens=9, temperature=0, stream=True)
    choices = [json.loads(event)["choices"][0] for event in events]
    assert len(choices) == 9
    assert "".join(choice["text"] for choice in choices) == text(PROMPT, 9)
    assert [choice["finish_reason"] for choice in choices] == [None] * 8 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_a_stop_sequence(server, text, stream):
    """It is several tokens long, and begins twice; the rest of the text is not computed."""
    whole = text(PROMPT, 40)
    at = next(n for n in range(6, 36) if whole.index(whole[n : n + 3]) == n)
    body = dict(prompt=[PROMPT], max_tokens=40, temperature=0, stop=["none of it", whole[at : at + 3]], stream=stream)
    if not stream:
        status, answer = server.complete(**body)
        assert status == 200 and answer["choices"][0]["text"] == whole[:at]
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == at + 3
    else:
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(body | dict(stream_options=dict(include_usage=True))))
        *events, last = connection.getresponse().read().decode().strip().split("\n\n")
        connection.close()
        *answers, final = [json.loads(event.removeprefix("data: ")) for event in events]
        choices = [answer["choices"][0] for answer in answers]
        assert last == "data: [DONE]" and "".join(choice["text"] for choice in choices) == whole[:at]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert {answer["usage"] for answer in answers} == {None}
        assert final["choices"] == [] and final["usage"]["completion_tokens"] == at + 3
    assert server.pool_is_free()


def test_many_at_once_get_each_their_own_text(server, text):
    prompts = [chr(48 + i) * (1 + 2 * i) for i in range(16)]
    with ThreadPoolExecutor(16) as clients:
        texts = list(clients.map(lambda prompt: server.text(prompt=prompt, max_tokens=8, temperature=0), prompts))
    assert texts == [text(prompt, 8) for prompt in prompts] and server.pool_is_free()


def test_samples_can_be_reproduced(server):
    draw = lambda seed: server.text(prompt=PROMPT, max_tokens=16, temperature=1.0, top_p=0.9, top_k=40, seed=seed)
    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_frees_the_pages(server, text, monkeypatch, stream):
    cancelled, cancel = [], server.worker.engine.cancel
    step = server.worker.engine.step
    monkeypatch.setattr(server.worker.engine, "cancel", lambda request: cancelled.append(request) or cancel(request))
    monkeypatch.setattr(server.worker.engine, "step", lambda: time.sleep(0.05) or step())  # long enough to hang up in
    connection = server.connect()
    body = dict(prompt=PROMPT, max_tokens=50, temperature=0, stream=stream)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        connection.getresponse().read(10)
    else:
        time.sleep(0.3)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert server.pool_is_free()
    assert [request.finish_reason for request in cancelled] == ["cancelled"]
    assert len(cancelled[0].tokens) < 11 + 50
    assert server.text(prompt=PROMPT, max_tokens=3, temperature=0) == text(PROMPT, 3)


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff", 400, "the body is not JSON"),
        (b"[" * 4000, 400, "the body is not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b" " * 5000, 413, "longer than 4096 bytes"),
        (dict(), 400, "there is no prompt"),
        (dict(prompt=""), 400, "the prompt has no tokens"),
        (dict(prompt="é"), 400, "character 0 of the prompt is 'é'"),
        (dict(prompt=["a", "b"]), 400, "prompt must be one text"),
        (dict(prompt=[True]), 400, "prompt must be one text"),
        (dict(prompt=[64]), 400, "not below 64"),
        (dict(prompt=[1] * 50), 400, "together they may be 64"),
        (dict(prompt="0", model="large"), 404, "there is no model 'large'"),
        (dict(prompt="0", max_tokens=0), 400, "max_tokens is 0"),
        (dict(prompt="0", max_tokens=True), 400, "max_tokens is true, which is of the wrong type"),
        (dict(prompt="0", temperature=-1), 400, "temperature is -1.0"),
        (dict(prompt="0", temperature=10**400), 400, "temperature is inf"),
        (b'{"prompt": "0", "top_p": NaN}', 400, "top_p is inf"),
        (dict(prompt="0", temperature="hot"), 400, 'temperature is "hot", which is of the wrong type'),
        (dict(prompt="0", n=2), 400, "n is not supported"),
        (dict(prompt=[[1], [2]]), 400, "prompt must be one text"),
        (dict(prompt="0", stop=""), 400, "stop must be one text, or a list of at most 4, none of them empty"),
        (dict(prompt="0", stop=["a"] * 5), 400, "stop must be one text, or a list of at most 4"),
        (dict(prompt="0", stop_token_ids=[64]), 400, "an end token is negative, or not below 64"),
        (dict(prompt="0", stream_options={}), 400, "stream_options are for a stream"),
        (dict(prompt="0", suffix="."), 400, "suffix is not supported"),
        (dict(prompt="0", n=True), 400, "n is not supported"),
        (dict(prompt="0", echo=0), 400, "echo is not supported"),
        (dict(prompt="0", colour="red"), 400, "there is no option 'colour'"),
        (b'{"prompt": "0", "\\ud800": 1}', 400, "there is no option '\\ud800'"),
        (dict(prompt="0", max_tokens=10**3000), 400, "max_tokens is 1000000"),
        (dict(prompt="0", top_k=10**3000), 400, "top_k is 1000000"),
    ],
)
def test_errors_have_a_message_and_status(server, body, status, message):
    got, answer, _ = server.call("POST", "/v1/completions", body)
    assert (got, answer["error"]["type"]) == (status, "invalid_request_error") and message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 200


def test_disconnecting_within_the_body_is_no_error(server, caplog):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 50\r\n\r\n{")
    with caplog.at_level("ERROR"):
        time.sleep(0.2)
        connection.close()
        time.sleep(0.2)
        assert server.call("GET", "/v1/models")[0] == 200
    assert not caplog.records


def test_other_paths_and_methods_are_errors_in_json(server):
    assert server.call("GET", "/v1/nothing")[0] == 404
    status, answer, _ = server.call("GET", "/v1/completions")
    assert status == 405 and answer["error"]["type"] == "invalid_request_error"


def test_a_full_pool_makes_requests_wait_and_a_full_queue_rejects_them(engine, text):
    """Each takes 7 of 24 pages: three run at once, and three may be in the engine at once."""
    with serving(Worker(engine, most=5)) as server, ThreadPoolExecutor(5) as clients:
        held = threading.Event()
        server.worker._commands.put(lambda: held.wait(SECONDS))
        ask = dict(prompt=PROMPT, max_tokens=40, temperature=0)
        waiting = [clients.submit(server.text, **ask) for _ in range(5)]
        while server.worker.open < 5:
            time.sleep(0.01)
        status, answer, headers = server.call("POST", "/v1/completions", ask)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error" and headers["retry-after"] == "1"
        held.set()
        assert [answer.result(SECONDS) for answer in waiting] == [text(PROMPT, 40)] * 5
        assert server.pool_is_free()


def test_a_server_that_ends_ends_its_requests(engine):
    with serving(Worker(engine, most=5)) as server, ThreadPoolExecutor(1) as clients:
        step, engine.step = engine.step, lambda: time.sleep(0.2) or step()
        try:
            answer = clients.submit(server.complete, prompt=PROMPT, max_tokens=50)
            while not engine.scheduler.running:
                time.sleep(0.01)
            server.worker.close()
            status, told = answer.result(SECONDS)
        finally:
            del engine.step
        assert status == 503 and told["error"]["message"] == "the request was cancelled"
        assert server.complete(prompt=PROMPT)[0] == 503
        assert engine.scheduler.pool.used == 0
        for _ in engine.run():
            pass


def test_a_failing_engine_fails_every_request(engine, caplog):
    class Broken(Exception):
        pass

    def broken():
        raise Broken

    told, ended = [], threading.Event()
    engine.step = broken
    worker = None
    try:
        worker = Worker(engine, most=2)
        worker.submit([1], Sampling(), lambda *news: told.append(news) or ended.set())
        assert ended.wait(SECONDS) and told == [([], "failed")] and isinstance(worker.failure, Broken)
        (record,) = caplog.records  # with the traceback, for the one who runs the server
        assert "the engine failed" in record.getMessage() and record.exc_info[0] is Broken
    finally:
        del engine.step
        worker.close()
        for request in list(engine.scheduler.waiting):
            engine.cancel(request)
