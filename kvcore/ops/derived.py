# SPDX-License-Identifier: Apache-2.0
"""What takes an operator's arguments and answers something else: its plan, its scenario.

Each is made of the operator's own code (kvcore.ops.twins), so a checker of types or an editor,
which runs nothing, would not see its parameters.  They read the stub beside this file, which
``python .ci/stub_of_derived.py`` writes from the operators.
"""

from __future__ import annotations

from kvcore.ops.gather_pa import GATHER, gather_pa_kv_cache
from kvcore.ops.gather_selection import SELECT, gather_selection_kv_cache
from kvcore.ops.kv_cache_update import UPDATE, kv_cache_update
from kvcore.ops.scatter_pa import SCATTER, SCATTER_KEY, scatter_pa_cache, scatter_pa_kv_cache
from kvcore.ops.scenario import Scenario, scenario
from kvcore.ops.twins import plan_twin, twin

__all__ = [
    "plan_gather_pa_kv_cache",
    "plan_gather_selection_kv_cache",
    "plan_kv_cache_update",
    "plan_scatter_pa_cache",
    "plan_scatter_pa_kv_cache",
    "scenario_of",
]

plan_scatter_pa_kv_cache = plan_twin(scatter_pa_kv_cache, SCATTER, module=__name__)
plan_scatter_pa_cache = plan_twin(scatter_pa_cache, SCATTER_KEY, module=__name__)
plan_kv_cache_update = plan_twin(kv_cache_update, UPDATE, module=__name__)
plan_gather_pa_kv_cache = plan_twin(gather_pa_kv_cache, GATHER, module=__name__)
plan_gather_selection_kv_cache = plan_twin(
    gather_selection_kv_cache,
    SELECT,
    "\n\n    Each run returns a new array and fills stats anew.\n    ",
    module=__name__,
)
scenario_of = twin(
    scatter_pa_kv_cache,
    SCATTER,
    scenario,
    name="scenario_of",
    returns=Scenario,
    module=__name__,
    doc="""Say which scenario these arguments are, and which SoC would run them.

    Takes the arguments of scatter_pa_kv_cache; each array may be a pair (shape, dtype) in its
    place, which stands for a contiguous array of that shape (in elements, also of float4).
    soc, backend and num_threads change nothing here.  Nothing is read but shapes, strides and
    dtypes, and nothing is written.

    Raises what scatter_pa_kv_cache raises, without a SoC, for arguments that are wrong anywhere.

    >>> import kvcore
    >>> found = kvcore.scenario_of(
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), ((4,), "int32"),
    ...     ((4, 8, 128), "float16"), ((64, 8, 16, 128), "float16"), scatter_mode="NHSD",
    ... )
    >>> found.number, found.runs["A3"], found.runs["950"] is None
    (7, None, False)
    """,
)
