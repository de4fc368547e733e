"""`check_distributions.py FOLDER`: the wheel and the sdist in a folder hold what they should, and nothing else.

The wheel has every module of the package, `py.typed`, and the parts of the report. The sdist also has what a packager
needs to test and document the package.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED_BESIDE_THE_PACKAGE = {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "docs/settings.md",
    "mkdocs.yml",
    "notebooks/01_first_run.ipynb",
    "pyproject.toml",
    "recipes/quickstart.py",
    "tests/conftest.py",
    "tests/house/test_rooms.py",
}


def main(folder: Path) -> None:
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_a3po").rglob("*.py")} | {"trl_a3po/py.typed"}
    package |= {f"trl_a3po/report/html/page.{suffix}" for suffix in ("css", "html", "js")}
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    faults = [
        *(f"the wheel lacks {name}" for name in sorted(package - in_wheel)),
        *(f"the wheel has {name}" for name in sorted(in_wheel - package)),
        *(f"the sdist lacks {name}" for name in sorted((package | NEEDED_BESIDE_THE_PACKAGE) - in_sdist)),
        *(f"the sdist has {name}" for name in sorted(in_sdist) if "__pycache__" in name),
    ]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{wheel.name}: {len(in_wheel)} files; {sdist.name}: {len(in_sdist)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
