"""The settings of the engine: what it is, where it runs, and what vLLM leaves to be set.

Guarantees: an engine given by name can be built from the settings; an engine object has the methods of
`trl_a3po.protocol.engine.Engine`; a setting that this engine would not follow is refused.
"""

import shutil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch

from trl_a3po.engines.vllm.servers.http import server_url

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig

ENGINE_METHODS = ("start", "submit", "wait", "cancel", "publish", "score", "stats", "close")


def check_engine(config: "A3POConfig") -> None:
    """Raise `ValueError` for an engine that cannot be built or cannot do what is asked of it."""
    if isinstance(config.engine, str) and config.engine not in ("transformers", "vllm"):
        raise ValueError(
            f"engine={config.engine!r} is not known: set 'transformers', 'vllm', or an object with the methods of "
            "trl_a3po.protocol.engine.Engine. An object is not part of a pickled configuration: set it again."
        )
    if not isinstance(config.engine, str):
        _check_engine_object(config)
    if config.engine_dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(
            f"engine_dtype={config.engine_dtype!r} is not known: set 'float32', 'bfloat16' or 'float16', or leave "
            "it out to follow the trainer."
        )
    _check_devices(config)
    _check_vllm(config)
    if config.deterministic and config.engine != "vllm" and config.engine_max_prompt_tokens is None:
        raise ValueError(
            "deterministic=True pads every prompt to one length, which engine_max_prompt_tokens=None leaves open: "
            "set engine_max_prompt_tokens to the length of your longest prompt."
        )


def _check_engine_object(config: "A3POConfig") -> None:
    if isinstance(config.engine, type):
        raise ValueError(f"engine={config.engine.__name__} is a class: pass an object of it.")
    missing = [name for name in ENGINE_METHODS if not callable(getattr(config.engine, name, None))]
    if missing:
        raise ValueError(
            f"engine is a {type(config.engine).__name__} without {', '.join(missing)}: set 'transformers', 'vllm', "
            "or an object with the methods of trl_a3po.protocol.engine.Engine."
        )


def _check_devices(config: "A3POConfig") -> None:
    if config.process_index != 0:  # the engine runs on the main process's machine, and this may be another
        return
    here = f"'cpu'{' or an accelerator of this machine' if torch.accelerator.is_available() else ''}"
    accelerator = torch.accelerator.current_accelerator()
    known = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    for name in config.engine_devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise ValueError(f"engine_device={name!r} is not a device: set {here}.") from None
        last = 0 if device.type == "cpu" else torch.accelerator.device_count() - 1
        if device.type not in known or (device.index or 0) > last:
            raise ValueError(f"engine_device={name!r} does not exist here: set {here}.")


def _check_vllm(config: "A3POConfig") -> None:
    if config.engine != "vllm":
        if config.vllm_server_urls:
            raise ValueError(
                f"vllm_server_urls={config.vllm_server_urls} is not used with engine={config.engine!r}: set "
                "engine='vllm', or leave it out."
            )
        return
    device = next(iter(config.engine_devices), config.device.type)
    if config.deterministic and not config.vllm_server_urls and device == "cpu":
        raise ValueError(
            "deterministic=True cannot hold with engine='vllm' on a CPU, where results depend on what is batched: "
            "set engine_device to a GPU, engine='transformers' or deterministic=False."
        )
    if not config.vllm_server_urls:
        _check_no_server_settings(config)
        _check_interpreter(config)
        _check_tensor_parallel(config)
    if config.vllm_server_urls and config.engine_slots is not None:
        raise ValueError(
            f"engine_slots={config.engine_slots} is decided by running vLLM servers: start them with --max-num-seqs "
            f"{config.engine_slots}, and leave engine_slots out."
        )
    _check_urls(list(config.vllm_server_urls or ()))


def _check_no_server_settings(config: "A3POConfig") -> None:
    for name in ("vllm_weight_transfer", "vllm_weights_dir", "vllm_outage_timeout"):
        unset = type(config).__dataclass_fields__[name].default
        if getattr(config, name) != unset:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect without vllm_server_urls, because vLLM then runs in "
                f"a process of the trainer: leave it at {unset!r}, or set vllm_server_urls."
            )


def _check_interpreter(config: "A3POConfig") -> None:
    """Whether there is such a program; `checks/vllm_python.py` asks it for vLLM."""
    if config.process_index != 0 or config.vllm_python is None:  # the engine runs on the main process's machine
        return
    if shutil.which(config.vllm_python) is None:
        raise ValueError(
            f"vllm_python={config.vllm_python!r} is no program that can be run here: set it to the Python interpreter "
            "of an environment with vLLM, such as '/path/to/venv/bin/python', or leave it out if vLLM is installed "
            "beside the trainer."
        )


def _check_tensor_parallel(config: "A3POConfig") -> None:
    size = config.vllm_tensor_parallel_size
    if type(size) is not int or size < 2:
        return
    devices = [torch.device(name) for name in config.engine_devices]
    if any(device.type == "cpu" for device in devices):
        raise ValueError(
            f"vllm_tensor_parallel_size={size} spreads each replica over {size} GPUs, and engine_device="
            f"{config.engine_device!r} names the CPU, over which no replica is spread: leave "
            f"vllm_tensor_parallel_size at 1, or set engine_device to {size} GPUs."
        )
    if not devices or len(devices) % size:
        raise ValueError(
            f"vllm_tensor_parallel_size={size} spreads each replica over {size} GPUs, and engine_device="
            f"{config.engine_device!r} does not name {size} GPUs or a multiple of {size}: set engine_device to them, "
            f"such as {[f'cuda:{index}' for index in range(size)]}, or leave vllm_tensor_parallel_size at 1."
        )
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"engine_device={config.engine_device!r} names a GPU twice, which cannot hold with "
            f"vllm_tensor_parallel_size={size}, because every part of a replica needs a GPU of its own: name each GPU "
            "once."
        )


def _check_urls(urls: list[str]) -> None:
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"vllm_server_urls holds {url!r}: set URLs such as 'http://localhost:8000'.")
        if urlsplit(url).username is not None:
            raise ValueError(
                f"vllm_server_urls holds a user for {urlsplit(url).hostname}, which vLLM does not know: leave it "
                "out, and set the environment variable VLLM_API_KEY to the server's --api-key."
            )
    servers = [server_url(url) for url in urls]
    if twice := sorted({url for url in servers if servers.count(url) > 1}):
        raise ValueError(
            f"vllm_server_urls={urls} names {twice[0]} twice, which would count one server as "
            "two: leave one of them out."
        )
