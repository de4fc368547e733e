"""The version is set in `trl_a3po/__init__.py`; the files that repeat it for readers say the same."""

import re
from pathlib import Path

import trl_a3po

ROOT = Path(trl_a3po.__file__).parent.parent


def test_the_citation_names_the_version():
    assert f"\nversion: {trl_a3po.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_names_the_version_if_any():
    named = re.findall(r"^Version (\S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(named) <= {trl_a3po.__version__}
