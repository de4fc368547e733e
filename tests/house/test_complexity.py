"""No function is harder to follow than the rules of the house allow."""

from pathlib import Path

from complexipy import file_complexity

import trl_a3po

PACKAGE = Path(trl_a3po.__file__).parent
MOST = 15


def test_no_function_has_a_cognitive_complexity_above_15():
    hard = {
        f"{path.relative_to(PACKAGE)}:{function.name}": function.complexity
        for path in PACKAGE.rglob("*.py")
        for function in file_complexity(str(path)).functions
        if function.complexity > MOST
    }
    assert not hard
