"""An unsupported TRL raises when the package is imported."""

import inspect
import subprocess
import sys

import pytest
from trl import GRPOTrainer

from trl_a3po import A3POTrainer
from trl_a3po._compat import TESTED, check_hooks, check_trl_version


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

    check_hooks(GRPOTrainer)
    with pytest.raises(ImportError, match=r"Moved\._compute_loss\('self', 'model', 'inputs'\)"):
        check_hooks(Moved)
    with pytest.raises(ImportError, match=r"Missing\._tokenize_prompts.*no such method"):
        check_hooks(Missing)


@pytest.mark.parametrize(
    "library, owner, name",
    [
        ("transformers", "transformers.Trainer", "_get_dataloader"),
        ("accelerate", "accelerate.Accelerator", "unwrap_model"),
        ("peft", "peft.tuners.lora.Linear", "get_delta_weight"),
    ],
)
def test_a_changed_method_of_another_library_is_named_with_the_tested_version(monkeypatch, library, owner, name):
    monkeypatch.setattr(f"{owner}.{name}", lambda self, other: None)
    with pytest.raises(ImportError) as error:
        check_hooks(GRPOTrainer)
    assert f"{name}('self', " in str(error.value) and f"the installed {library} " in str(error.value)
    assert f'pip install "{library}=={TESTED[library]}.*"' in str(error.value)


def test_the_trainer_takes_the_arguments_of_trls_in_their_order():
    def arguments(trainer_class):
        parameters = inspect.signature(trainer_class).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    *mine, (name, _, _) = arguments(A3POTrainer)
    assert mine == arguments(GRPOTrainer) and name == "on_group"
