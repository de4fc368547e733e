"""Where a study writes."""

import sys
from pathlib import Path


def output_folder(text: str) -> Path:
    """The folder that `--output` names, which is made. Ends the process with a sentence where it cannot be."""
    folder = Path(text).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--output is {text!r}, but this folder cannot be made ({error}): pass another folder.")
    return folder
