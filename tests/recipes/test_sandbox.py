"""The recipe for rewards that execute a completion: what a program can and cannot do."""

import socket
import subprocess
import time
from pathlib import Path

import cloudpickle
import pytest

from tests.workers.processes import until
from trl_a3po.cli.recipe import find_function

RECIPES = Path(__file__).parents[2] / "recipes"
passes_tests = find_function("sandbox.py:passes_tests", "reward_funcs", [RECIPES])
namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
TEST = "assert add(1, 2) == 3"
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"


def score(completion, test=TEST):
    return passes_tests(completions=[completion], tests=[test])[0]


def test_code_that_passes_is_1_and_other_code_is_0():
    chat = [{"role": "assistant", "content": f"First:\n{RIGHT}"}]
    wrong = [RIGHT.replace("+", "-"), "no code at all", "```python\nimport sys\nsys.exit(0)\n```", "", "\ud800\0"]
    assert passes_tests(completions=[RIGHT, chat, *wrong], tests=[TEST] * 7) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(4 << 30)",
        "open('big', 'wb').write(bytes(32 << 20))",
        "while True: print('x' * 1000)",
        pytest.param("while True: pass", marks=pytest.mark.long),
        pytest.param("import time\ntime.sleep(3600)", marks=pytest.mark.long),
        pytest.param("import os\nwhile True: os.fork()", marks=pytest.mark.long),
        "import os\nassert not os.environ.get('HF_TOKEN') and os.listdir() == []\nraise SystemExit",
    ],
)
def test_a_program_beyond_a_limit_is_0_and_ends(program, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert score(program, "") == 0.0


def test_a_program_sees_neither_environment_nor_files_of_ours(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert score("import os\nassert 'HF_TOKEN' not in os.environ and os.listdir() == []", "") == 1.0


@namespaces
def test_a_program_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"import socket\nsocket.create_connection({server.getsockname()!r}, timeout=2)"
        assert score(reach, "") == 0.0
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@namespaces
def test_what_a_program_starts_does_not_outlive_it(tmp_path):
    path = tmp_path / "alive"
    path.touch()
    started = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        open({str(path)!r}, "a").write("x")
        time.sleep(0.05)
time.sleep(0.5)
"""
    assert score(started, "") == 1.0
    assert path.stat().st_size > 0
    size = []
    until(lambda: size.append(path.stat().st_size) or time.sleep(0.3) or size[-1] == path.stat().st_size)


def test_a_reward_worker_can_run_it():
    assert cloudpickle.loads(cloudpickle.dumps(passes_tests))(completions=[RIGHT], tests=[TEST]) == [1.0]
