"""What a bug report needs to say about a machine: versions, devices, packages.

Guarantees: only reads; returns no path, host name or environment variable, which may be private.
"""

import importlib.metadata
import os
import platform

import torch

from trl_a3po import __version__

PACKAGES = (
    "trl",
    "transformers",
    "torch",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "vllm",
    "math-verify",
    "numpy",
    "matplotlib",
)


def environment() -> str:
    """One `name: value` per line, to be pasted into a bug report."""
    facts = [
        ("trl-a3po", __version__),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
        ("CPU cores", f"{_cores()} of {os.cpu_count()}"),
        ("torch threads", str(torch.get_num_threads())),
        ("torch CUDA", torch.version.cuda or "none"),
        *_devices(),
        *package_versions().items(),
    ]
    return "\n".join(f"{name}: {value}" for name, value in facts)


def package_versions() -> dict[str, str]:
    """The version of each package that matters to a run."""
    return {name: _version(name) for name in PACKAGES}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1


def _devices() -> list[tuple[str, str]]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return [("accelerator", "none")]
    kind = accelerator.type
    if kind != "cuda":
        return [("accelerator", f"{torch.accelerator.device_count()} x {kind}")]
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [
        (f"cuda:{i}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute {device.major}.{device.minor}")
        for i, device in enumerate(properties)
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
