# SPDX-License-Identifier: Apache-2.0
"""The hardware whose limits a call can be checked against, as data.

A SoC is a name; its Profile holds a typed table for each operator, which the operators' rules
(kvcore/ops/soc_*.py) read, and from which ``print(SoC("A3"))`` and docs/soc.md are made.  No rule
compares names: what sets one machine apart is a field of its table.
"""

from kvcore.soc.names import (
    A2,
    A3,
    A950,
    CURRENT,
    ENVIRONMENT,
    PROFILES,
    SoC,
    current,
    from_environment,
    from_product,
    resolve,
    use_soc,
)
from kvcore.soc.profiles import Profile
from kvcore.soc.scatter import SCENARIOS, Accepted

__all__ = [
    "A2",
    "A3",
    "A950",
    "CURRENT",
    "ENVIRONMENT",
    "PROFILES",
    "SCENARIOS",
    "Accepted",
    "Profile",
    "SoC",
    "current",
    "from_environment",
    "from_product",
    "resolve",
    "use_soc",
]
