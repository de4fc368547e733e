"""An unsupported TRL raises when the package is imported."""

import subprocess
import sys

import pytest
from trl import GRPOTrainer

from trl_a3po._compat import check_trl_hooks, check_trl_version


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "0.29.0", "2.0.0"])
def test_other_versions_are_refused_with_what_to_install(version):
    with pytest.raises(ImportError) as error:
        check_trl_version(version)
    assert version in str(error.value)
    assert ">=1.16,<1.17" in str(error.value) and "pip install" in str(error.value)


@pytest.mark.parametrize("version", ["1.16.0", "1.16.3"])
def test_the_supported_minor_is_accepted(version):
    check_trl_version(version)


def test_importing_the_package_refuses_another_trl():
    code = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "1.18.2" if name == "trl" else real(name)
import trl_a3po
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "ImportError: trl_a3po supports TRL >=1.16,<1.17, but 1.18.2 is installed" in result.stderr


def test_importing_the_package_does_not_import_trl_or_torch():
    code = "import sys, trl_a3po; assert not {'trl', 'torch'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_hook_with_other_parameters_is_named_in_the_error():
    class Moved(GRPOTrainer):
        def _compute_loss(self, batch):
            pass

    class Missing(GRPOTrainer):
        _tokenize_prompts = None

    check_trl_hooks(GRPOTrainer)
    with pytest.raises(ImportError, match=r"Moved\._compute_loss\('self', 'model', 'inputs'\)"):
        check_trl_hooks(Moved)
    with pytest.raises(ImportError, match=r"Missing\._tokenize_prompts.*no such method"):
        check_trl_hooks(Missing)
