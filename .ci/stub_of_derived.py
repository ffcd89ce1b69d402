# SPDX-License-Identifier: Apache-2.0
"""Writes kvcore/ops/derived.pyi, which shows editors and checkers of types what the module makes.

Each function has the parameters of an operator, read from the operator's source, and the docstring
and result that it has when it runs: ``python .ci/stub_of_derived.py``, then ``ruff format``.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from kvcore.ops import derived, gather_pa, gather_selection, kv_cache_update, scatter_pa

STUB = Path(__file__).parents[1] / "kvcore/ops/derived.pyi"
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# Written by .ci/stub_of_derived.py from the operators' own parameters; not to be edited.

from typing import Any

from kvcore._core.plan import Plan
from kvcore.ops.scenario import Scenario
"""


def stub() -> str:
    operators = {}
    for module in (gather_pa, gather_selection, kv_cache_update, scatter_pa):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef):
                operators[node.name] = node
    made = ast.Module([], [])
    for name in derived.__all__:
        function = getattr(derived, name)
        of = "scatter_pa_kv_cache" if name == "scenario_of" else name.removeprefix("plan_")
        node = operators[of]
        result = ast.Name(function.__annotations__["return"])
        body = [ast.Expr(ast.Constant(function.__doc__))]
        made.body.append(ast.FunctionDef(name, node.args, body, [], result, type_params=[]))
    return HEAD + ast.unparse(ast.fix_missing_locations(made)) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
