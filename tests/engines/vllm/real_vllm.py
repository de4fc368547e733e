"""Where a real vLLM is found, which has an environment of its own."""

import os
from pathlib import Path

import pytest

ENVIRONMENT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_a3po" / "vllm-venv"


def vllm_python() -> str:
    """An interpreter that has vLLM; skips the test if there is none."""
    python = os.environ.get("TRL_A3PO_VLLM_PYTHON", str(ENVIRONMENT / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(f"no vLLM: {python} does not exist; set TRL_A3PO_VLLM_PYTHON to an interpreter that has it")
    return python
