"""Whatever the bytes that are read, only errors that this package promises come out, soon, and without much memory."""

import asyncio
import json
import math
import random
import resource
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save

from tests.fuzz import damaged, damaged_json
from tests.rollout.queue_fakes import make_rollout
from trl_a3po.checkpoints import checkpoint
from trl_a3po.checkpoints.choose_checkpoint import choose_checkpoint
from trl_a3po.checkpoints.queue_codec import encode_state
from trl_a3po.checkpoints.saved_run import read_run, read_slices
from trl_a3po.cli import train as command
from trl_a3po.engines.vllm.servers.completions import parse_prompt_score, parse_score
from trl_a3po.engines.vllm.servers.extension.a3po_images import unpacked
from trl_a3po.engines.vllm.servers.http import AnswerFault, Call, HttpFault
from trl_a3po.engines.vllm.servers.token_chunks import parse_answer
from trl_a3po.episodes.chat_completions import Refused, read_messages, read_request
from trl_a3po.episodes.endpoint import refusal
from trl_a3po.episodes.http_connection import HTTPConnection
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.records import Score
from trl_a3po.report.history import by_staleness, read_history
from trl_a3po.report.timeline import read_timeline
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.queue_state import OutstandingState, QueueState
from trl_a3po.workers.channel import Channel, UnreadableMessage

RECIPES = Path(__file__).parents[1] / "recipes"
MOST_MEMORY = 1 << 30
SLOWEST = 120.0  # seconds for one input, on a machine that does much else
SEED = 0


@pytest.fixture(params=[1, pytest.param(13, marks=pytest.mark.slow)], ids=["few", "many"])
def count(request):
    """How many inputs for a usual number of them: 7,220 in all tests here, or 93,860."""
    return lambda usual: usual * request.param


@pytest.fixture(autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY


def fuzz(count, one, allowed):
    """Call `one(noise)` `count` times; how many raised one of `allowed`, and how many nothing."""
    raised = 0
    for number in range(count):
        noise = random.Random(f"{SEED} {number}")
        began = time.monotonic()
        try:
            one(noise)
        except allowed:
            raised += 1
        except BaseException as error:
            raise AssertionError(f"input {number} raised {type(error).__name__}: {str(error)[:300]}") from error
        assert time.monotonic() - began < SLOWEST, f"input {number} took long"
    return raised


def queue_state():
    score = Score([[0.1, 0.5], [1.0, math.nan]], {"label": ["a", None]}, [("kl", 0.1)], 1.5)
    return QueueState(
        4, 17, 3, 2, 1, Outcomes(17, 20, {"trained": 12}, {"trained": 12}, 4, 2),
        [
            OutstandingState(12, [1, 2], 3, 2, ["died"], [make_rollout([0, 1]), make_rollout([1])], score, "1a"),
            OutstandingState(14, [3], 3, 1, [], [make_rollout([0])] * 2, None),
            OutstandingState(15, None, 2, 1),
        ],
    )  # fmt: skip


def saved_folder(path):
    """A checkpoint's own files, of a queue with groups in every state."""
    checkpoint.begin(path)
    values, tensors = encode_state(queue_state())
    checkpoint.write_tensors(path / checkpoint.GROUPS, tensors)
    batch = {"0/completion_ids": torch.zeros(2, 3)}
    checkpoint.write_tensors(path / checkpoint.batch_file(0), batch)
    state = {
        "format": checkpoint.FORMAT,
        "policy_version": 3,
        "micro_steps": 6,
        "processes": 1,
        "evaluation_noise": 0,
        "publishes_counted_from": 2,
        "settings": {"order": {"seed": 1}},
        "queue": values,
        "slices": [["completion_ids", "advantages"], None],
        "logs": {"prompt": ["a"], "rewards": {"reward": [0.5]}},
    }
    checkpoint.write_json(path / checkpoint.STATE, state)
    (path / "trainer_state.json").write_text("{}")
    checkpoint.complete(path, 3, "run")
    return path


def test_a_damaged_checkpoint_is_refused_or_loaded_as_it_was(tmp_path, count):
    whole = saved_folder(tmp_path / "whole" / "checkpoint-3")
    expected = repr(read_run(whole))
    loaded = []

    def one(noise):
        folder = tmp_path / "checkpoint-3"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        path = noise.choice(sorted(folder.iterdir()))
        change = damaged_json if path.suffix == ".json" else damaged
        path.write_bytes(change(path.read_bytes(), noise))
        resume = noise.choice([True, str(folder)])
        chosen = choose_checkpoint(resume, str(tmp_path))
        run = read_run(chosen)
        read_slices(chosen, 0, run.slices)
        assert repr(run) == expected
        loaded.append(chosen)

    refused = fuzz(count(400), one, ValueError)
    assert refused > 0 and loaded  # a changed marker or trainer_state.json may still be true


def test_files_of_a_queue_that_someone_else_wrote_are_refused_or_whole(tmp_path, count):
    folder = saved_folder(tmp_path / "checkpoint-3")
    files = {name: (folder / name).read_bytes() for name in (checkpoint.STATE, checkpoint.GROUPS)}

    def one(noise):
        name = noise.choice([checkpoint.STATE, checkpoint.STATE, checkpoint.GROUPS])
        change = damaged_json if name == checkpoint.STATE else damaged
        (folder / name).write_bytes(change(files[name], noise))
        try:
            run = read_run(folder)
            assert all(isinstance(item.prompt_index, int) for item in run.queue.outstanding)
            read_slices(folder, 0, run.slices or [])
        finally:
            (folder / name).write_bytes(files[name])

    assert fuzz(count(500), one, ValueError) > 0


def test_a_channel_unpickles_nothing_but_whole_messages(count):
    message = {"tokens": list(range(20)), "text": "abc"}

    def one(noise):
        ours, theirs = socket.socketpair()
        receiver = Channel(ours)
        sent = bytearray()
        sender = Channel(theirs)
        sender._socket = type("Sink", (), {"send": lambda self, data: sent.extend(data) or len(data)})()
        for _ in range(3):
            sender.send(message)
        with ours, theirs:
            theirs.sendall(damaged(bytes(sent), noise)[: 1 << 16])
            theirs.shutdown(socket.SHUT_WR)
            while True:
                assert all(received == message for received in receiver.receive())

    assert fuzz(count(1500), one, (EOFError, UnreadableMessage)) == count(1500)


ANSWER = {
    "id": "x",
    "choices": [
        {"index": i, "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, 0.0]}, "finish_reason": "stop"}
        for i in range(2)
    ],
    "usage": None,
}
SCORE = {
    "choices": [{"index": 0, "logprobs": {"top_logprobs": [{"token_id:5": -0.25}]}, "prompt_logprobs": [
        None, {"5": {"logprob": -0.25}}]}]
}  # fmt: skip


def test_an_answer_of_a_server_is_what_was_asked_for_or_a_fault(count):
    answer, score = json.dumps(ANSWER).encode(), json.dumps(SCORE).encode()

    def one(noise):
        kind = noise.randrange(3)
        if kind == 0:
            for chunk in parse_answer(damaged_json(answer, noise), 2):
                assert chunk.index < 2 and len(chunk.token_ids) == len(chunk.logps)
        else:
            parse = parse_score if kind == 1 else parse_prompt_score
            text = damaged_json(score, noise).decode(errors="replace")
            found = parse(text, [5], 0) if kind == 1 else parse(text, [5])
            assert found is None or all(isinstance(logp, int | float) for logp in found)

    assert fuzz(count(3000), one, AnswerFault) > 0


def test_images_that_a_server_is_sent_are_arrays_or_refused(count):
    fields = {"field.pixel_values": torch.arange(12.0).view(3, 4), "field.grid": torch.tensor([[1, 2, 2]])}
    body = save({"sizes": torch.tensor([[20, 16], [12, 12]]), **fields})

    def one(noise):
        images, found = unpacked(damaged(body, noise))
        assert images and all(image.ndim == 3 for image in images)
        assert all(isinstance(field, torch.Tensor) for field in found.values())

    assert fuzz(count(1000), one, ValueError) > 0


def test_a_call_ends_in_an_answer_or_a_fault_whatever_the_server_sends(count):
    body = json.dumps(ANSWER).encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    answers = []

    def serve(server):
        while answers != ["end"]:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                try:
                    connection.sendall(answers[0])
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1 << 16)
                except (OSError, TypeError):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def one(noise):
            answers[:] = [damaged(whole, noise)]
            call = Call(url, "POST", "/v1/completions", {}, timeout=5.0)
            call.data()

        assert fuzz(count(200), one, HttpFault) > 0
        answers[:] = ["end"]
        socket.create_connection(server.getsockname()).close()
        thread.join(30)


CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stop": ["!"],
    "max_tokens": 5,
    "temperature": 1.0,
    "stream": False,
    "stream_options": {"include_usage": True},
}  # fmt: skip


def test_a_request_for_a_chat_completion_is_read_or_refused(count):
    body = json.dumps(CHAT).encode()

    def one(noise):
        request = read_request(damaged_json(body, noise), SamplingSettings(max_new_tokens=8))
        for message in read_messages(request.messages, {}):
            assert isinstance(message["content"], str)

    assert fuzz(count(2000), one, Refused) > 0


class Wire:
    """The transport of a connection: what was written, and whether it was closed."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        assert not self.closed
        self.written += data

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed


def test_an_http_connection_answers_or_closes_whatever_arrives(count):
    whole = b"".join(
        b"%b /v1 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer k\r\n%b\r\n%b" % request
        for request in (
            (b"POST", b"Content-Length: 2\r\n", b"{}"),
            (b"HEAD", b"", b""),
            (b"POST", b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        )
    )
    asked = []

    async def answer(request):
        asked.append(request)
        return refusal(400, "no")

    async def converse(noise):
        wire, data = Wire(), damaged(whole, noise)
        connection = HTTPConnection(answer, refusal)
        connection.connection_made(wire)
        while data and not wire.closed:
            size = noise.randint(1, 200)
            connection.data_received(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "an answer is under way"
        assert wire.written == b"" or wire.written.startswith(b"HTTP/1.1 ")

    with asyncio.Runner() as runner:
        fuzz(count(1000), lambda noise: runner.run(converse(noise)), ())
    assert len(asked) > 500


def test_a_recipe_is_read_or_refused_in_a_sentence(tmp_path, monkeypatch, count):
    trained = []
    monkeypatch.setattr(command, "train", lambda *arguments: trained.append(arguments))
    recipes = [path.read_bytes() for path in sorted(RECIPES.glob("*.yaml"))]

    def one(noise):
        path = tmp_path / "recipe.yaml"
        data = noise.choice(recipes)
        if noise.random() < 0.5:
            path.write_bytes(damaged(data, noise))
        else:
            values = json.dumps(yaml.safe_load(data)).encode()  # JSON is YAML
            path.write_bytes(damaged_json(values, noise))
        command.run([str(path), "--output_dir", str(tmp_path / "out"), "--bf16", "false"])

    assert fuzz(count(20), one, (command.SettingsError, SystemExit)) > 0
    assert trained


def test_a_timeline_and_a_log_are_read_or_refused(tmp_path, count):
    lines = [
        {"kind": "start", "time": 1.0, "run": "r", "version": 0, "resumed": False},
        {"kind": "group", "prompt": 0, "outcome": "trained", "taken": 2.0, "submitted": 1.0},
        {"kind": "checkpoint", "time": 3.0, "version": 1},
        {"kind": "start", "time": 4.0, "run": "r", "version": 1, "resumed": True},
        {"kind": "log", "time": 5.0, "logged": {"loss": 0.5, "step": 1}},
        {"kind": "end", "time": 6.0},
    ]

    def one(noise):
        path = tmp_path / "timeline.jsonl"
        written = [json.dumps(line).encode() for line in lines]
        at = noise.randrange(len(written))
        written[at] = damaged_json(written[at], noise)
        path.write_bytes(b"\n".join(written) + b"\n")
        state = tmp_path / "trainer_state.json"
        state.write_bytes(damaged_json(json.dumps({"log_history": [{"loss": 1.0, "step": 1}]}).encode(), noise))
        which = noise.randrange(3)
        if which == 0:
            read_timeline(path)
        elif which == 1:
            read_history(path)
        else:
            by_staleness(read_history(state))

    assert fuzz(count(600), one, ValueError) > 0


@pytest.mark.parametrize("answer", [b'{"choices": "\xf0"}', b'{"choices": \xf0}', b"[" * 100_000, b'{"a":' * 100_000])
def test_answers_that_fuzzing_found_are_faults(answer):
    with pytest.raises(AnswerFault):
        parse_answer(answer, 1)
