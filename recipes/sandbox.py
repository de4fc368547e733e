"""Rewards that execute what the model wrote: each program in a process of its own, with limits and without a network.

    trl-a3po train RECIPE.yaml --reward_funcs sandbox.py:passes_tests --reward_workers 4 --reward_timeout 60

`passes_tests` is 1 where the Python code of a completion passes the `tests` of its row (a column of Python text, such
as "assert add(1, 2) == 3"), and 0 elsewhere. It needs neither a service nor a container, and works offline.

What holds on every Linux: a program gets `SECONDS` of CPU time and of real time, `MEMORY` bytes, files of `FILE_SIZE`
bytes at most, no more than `OUTPUT` bytes of its output are read, it runs in an empty folder that is removed after it,
and it inherits no environment variable (no HF_TOKEN, no API keys). Where the system lets a user make namespaces
(`unshare -Urn true` says so by its exit code), it also has no network, and nothing that it starts outlives it.

What does not hold: a program can read every file that your user can read, so it is the missing network that keeps them
here. Set `NEEDS_NAMESPACES = True` to run nothing where there are no namespaces. A container of its own (bubblewrap,
gVisor, a virtual machine) is safer still; `python` below is then the command that starts it.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS = 5
MEMORY = 1 << 30
FILE_SIZE = 16 << 20
PROCESSES = 64
OUTPUT = 1 << 16
NEEDS_NAMESPACES = False

# Runs in the new process: takes away what it must not have, then runs the program that it reads.
LAUNCHER = """
import ctypes, os, resource, signal, sys
seconds, memory, file_size, processes, needs_namespaces = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_NETWORK, NEW_PROCESSES, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
END_WITH_PARENT = 1
isolated = libc.unshare(NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_IPC) == 0
if needs_namespaces and not isolated:
    sys.exit("this system gives a user no namespaces")
source = sys.stdin.buffer.read()
child = os.fork()  # the first process of the new namespace: when it ends, the kernel ends all others there
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 127)
libc.prctl(END_WITH_PARENT, signal.SIGKILL)
for limit, value in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file_size),
    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
exec(compile(source, "<completion>", "exec"), {"__name__": "__main__"})
"""


def passes_tests(completions, tests, **kwargs):
    return [float(runs(f"{code_of(text)}\n{test}")) for text, test in zip(completions, tests, strict=True)]


def code_of(completion):
    """The last fenced block of a completion, or all of it."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def runs(program):
    """Whether `program` runs to its end. A program that exits early does not: the word at the end is not printed."""
    word = secrets.token_hex(16)
    limits = [SECONDS, MEMORY, FILE_SIZE, PROCESSES, int(NEEDS_NAMESPACES)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        python = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        try:
            python.communicate(f"{program}\nprint({word!r})".encode(errors="replace"), timeout=SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(python.pid, signal.SIGKILL)
            python.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT))
        return python.returncode == 0 and output.read().rstrip().endswith(word.encode())
