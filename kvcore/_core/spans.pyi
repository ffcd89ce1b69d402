# SPDX-License-Identifier: Apache-2.0
import numpy as np
from numpy.typing import NDArray

class Spans: ...

def merge(starts: NDArray[np.int64], nbytes: int) -> NDArray[np.int64]: ...
