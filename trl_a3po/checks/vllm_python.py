"""Whether the interpreter of `vllm_python` has vLLM, before a model is loaded for it.

Guarantees: vLLM is looked for and not imported, which would take many seconds; whether it can be imported, its worker
finds out when it starts.
"""

import subprocess
import sys

from trl_a3po.config import A3POConfig
from trl_a3po.workers.process import worker_environment

PROBE = "import importlib.util; print('has vLLM:', importlib.util.find_spec('vllm') is not None)"
TIMEOUT = 60.0  # seconds; an interpreter on a shared folder may take some to start
INSTEAD = "set vllm_python to the interpreter of an environment with vLLM, or set vllm_server_urls to running servers."


def check_vllm_python(args: A3POConfig) -> None:
    """Raise `ValueError` for a `vllm_python` that is no Python interpreter, or has no vLLM."""
    python = args.vllm_python
    unused = args.engine != "vllm" or args.vllm_server_urls or args.process_index != 0
    if python is None or unused or python == sys.executable:
        return
    environment = worker_environment(None)
    del environment["PYTHONPATH"]  # as the worker is started
    try:
        probed = subprocess.run(
            [python, "-P", "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"vllm_python={python!r} cannot be run ({error}): {INSTEAD}") from None
    if probed.returncode or "has vLLM: " not in probed.stdout:
        last = (probed.stderr or probed.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
        raise ValueError(f"vllm_python={python!r} is no Python 3.11 or newer that works ({last[0]}): {INSTEAD}")
    if "has vLLM: False" in probed.stdout:
        raise ValueError(f"vllm_python={python!r} is a Python without vLLM: install vllm there, or {INSTEAD}")
