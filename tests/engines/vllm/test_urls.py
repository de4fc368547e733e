"""What may stand behind a URL, and how it may be written."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until
from tests.tiny import tiny_config
from trl_a3po.engines.vllm.servers import rollout_jobs
from trl_a3po.engines.vllm.servers.http import server_url
from trl_a3po.engines.vllm.servers.startup import served_config
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed

PAGE = "<!DOCTYPE html>\n<html><body><h1>It works!</h1></body></html>"


class PlainServer:
    """An HTTP server that answers everything alike."""

    def __init__(self, status: int, answer: str):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer.encode())

            do_POST = do_GET

            def log_message(self, *arguments):
                pass

        self.lora = False
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (200, PAGE, r"is no vLLM server: .*/version did not answer in JSON, but with a web page\. Set"),
        (404, PAGE, r"is no vLLM server: .*/version answered 404 with a web page\. Set"),
        (501, "", r"is no vLLM server: .*/version answered 501\. Set"),
        (200, '{"status": "ok"}', "is no vLLM server: .*does not answer like vLLM"),
        (401, '{"error": "Unauthorized"}', "wants a key: .*VLLM_API_KEY"),
        (500, "Internal Server Error", r"did not answer: .* answered 500: Internal Server Error\. Start it with"),
        (503, PAGE, r"did not answer: .* answered 503 with a web page\. Start it with"),
    ],
)
def test_what_is_no_vllm_server_is_told_in_a_sentence_without_its_page(tmp_path, status, answer, words):
    server = PlainServer(status, answer)
    try:
        with pytest.raises(EngineError, match=words) as error:
            started([server], tmp_path, start_timeout=0.3)
        assert server.url in str(error.value) and "<" not in str(error.value)
    finally:
        server.close()


def test_a_page_in_place_of_a_completion_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_jobs, "MOST_BACKOFF", 0.1)
    (server,) = servers = [StubServer(lora=True)]
    engine = started(servers, tmp_path)
    try:
        server.faults = ["garbage"] * 5
        engine.submit(requests(1))
        events = []
        until(lambda: events.extend(engine.wait(0.1)) or events)
        assert isinstance(events[0], GroupFailed)
        assert "with a web page" in events[0].reason and "<" not in events[0].reason
    finally:
        engine.close()


def test_a_server_that_refuses_the_weights_is_named_with_its_model(tmp_path):
    with pytest.raises(EngineError, match="If 'stub/base', which it serves, is another model than the trained one"):
        started([StubServer(refuses_weights=True)], tmp_path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_server_of_a_model_of_another_shape_is_refused(tmp_path, lora):
    folder = tmp_path / "another"
    tiny_config(hidden_size=64).save_pretrained(folder)
    with pytest.raises(EngineError, match=rf"it serves '{folder}', whose hidden_size is 64, but .* is 32"):
        started([StubServer(lora=lora, model=str(folder))], tmp_path)


@pytest.mark.parametrize("serves", ["", "no/such-model", "/a/folder/elsewhere", "two/slashes/more"])
def test_of_a_model_that_is_not_on_this_machine_nothing_is_known(serves):
    assert served_config(serves) == {}


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_may_be_the_one_that_other_clients_want(tmp_path, end):
    server = StubServer()
    assert server_url(f"{server.url}{end}") == server.url
    engine = started([_At(server, f"{server.url}{end}")], tmp_path)
    try:
        engine.submit(requests(1))
        finished(engine, 1)
    finally:
        engine.close()


class _At:
    def __init__(self, server: StubServer, url: str):
        self.lora, self.url = server.lora, url


def test_proxies_of_the_environment_are_not_asked(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine = started([StubServer()], tmp_path)
    try:
        engine.submit(requests(1))
        finished(engine, 1)
    finally:
        engine.close()
