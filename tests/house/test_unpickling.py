"""Unpickling runs code: it happens only with what this run has pickled, on a connection that only this run has."""

import ast
from pathlib import Path

import yaml
from trl.scripts import utils as trl_scripts

PACKAGE = Path(__file__).parents[2] / "trl_a3po"
OUR_OWN = {  # file -> whose pickles it reads
    "workers/channel.py": "the other end of a socket pair",
    "engines/transformers/worker.py": "the trainer, over the channel",
    "engines/vllm/process/vllm_worker.py": "the trainer, over the channel",
    "rewards/worker.py": "the trainer, over the channel",
    "rewards/messages.py": "a reward worker, over the channel",
    "workers/object_worker.py": "the trainer, over the channel",
    "workers/remote_object.py": "a process of an object, over the channel",
    "distributed/team.py": "itself",
}
READERS = {"pickle.loads", "pickle.load", "pickle.Unpickler", "cloudpickle.loads", "cloudpickle.load", "torch.load"}
READERS |= {"np.load", "numpy.load", "joblib.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "marshal.loads"}


def readers_in(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)} & READERS


def test_only_channels_of_this_run_are_unpickled():
    found = {str(path.relative_to(PACKAGE)): readers_in(path) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {path: {"pickle.loads"} for path in OUR_OWN}


def test_a_recipe_cannot_make_objects(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: !!python/object/apply:os.system ['touch made']\n")
    try:
        trl_scripts.TrlParser([]).parse_args_and_config(["--config", str(recipe)])
    except yaml.constructor.ConstructorError as error:
        assert "python/object" in str(error)
    else:
        raise AssertionError("the tag was read")
