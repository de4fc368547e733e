"""Prints the lowest version of each dependency that `pyproject.toml` allows, as constraints for pip."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for requirement in map(Requirement, project["dependencies"]):
    for bound in requirement.specifier:
        if bound.operator == ">=":
            print(f"{requirement.name}=={bound.version}")
