"""Runs a module of this package with an interpreter whose environment does not have it:
`python elsewhere.py MODULE ARGUMENTS...`.

Guarantees: of this file's environment, only this package can be imported, and its `__init__` is not run; everything
else comes from the interpreter's own environment. Processes that `multiprocessing` starts from there find the package
too. Imports nothing but the standard library.
"""

import runpy
import sys
import types
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def make_importable() -> None:
    """Make this package importable, without what stands in its `__init__`."""
    package = types.ModuleType(_PACKAGE.name)
    package.__path__ = [str(_PACKAGE)]
    sys.modules[_PACKAGE.name] = package


if __name__ in ("__main__", "__mp_main__"):
    make_importable()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
