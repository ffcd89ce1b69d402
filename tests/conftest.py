# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares; being here also makes ``import oracle`` work in subfolders."""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, Phase, settings

from kvcore._kernels import parallel

# Tests are small: where they ask for threads, they shall get them.
parallel.set_parallel_bytes(0)

# A shared machine says nothing about time, so there is no deadline.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    # Legal calls are drawn by construction; the few that are filtered are no fault of the code.
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
# A gate must say the same of the same code, so nothing is drawn at random there.
settings.register_profile(
    "ci", settings.get_profile("default"), derandomize=True, database=None, print_blob=True
)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000)
# Whether a test fails is all that tests/tools/mutants.py asks, two hundred times.
settings.register_profile(
    "brief",
    settings.get_profile("ci"),
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
)
DEFAULT = "ci" if os.environ.get("CI") else "default"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", DEFAULT))


def pytest_collection_finish() -> None:
    """Spare every later search for garbage what stays to the end: modules, torch's, the tests."""
    gc.collect()
    gc.freeze()
