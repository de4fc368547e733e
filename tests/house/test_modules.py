"""Every module with code says in a docstring what it is for."""

import ast
from pathlib import Path

import trl_a3po

PACKAGE = Path(trl_a3po.__file__).parent


def test_every_module_with_code_opens_with_a_docstring():
    modules = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not [
        str(path.relative_to(PACKAGE)) for path, tree in modules.items() if tree.body and not ast.get_docstring(tree)
    ]
