# SPDX-License-Identifier: Apache-2.0
from numpy import int32, int64
from numpy.typing import NDArray

def serve(
    out: int,
    out_stride: int,
    pool: int,
    pool_stride: int,
    capacity: int,
    full: int,
    num_blocks: int,
    block_size: int,
    block_stride: int,
    row_stride: int,
    row_bytes: int,
    source: NDArray[int32],
    host_rows: NDArray[int64],
    n_threads: int = 1,
) -> None: ...
def install(
    out: int,
    out_stride: int,
    pool: int,
    pool_stride: int,
    capacity: int,
    row_bytes: int,
    target: NDArray[int32],
    n_threads: int = 1,
) -> None: ...
def store(
    rows: int,
    stride: int,
    capacity: int,
    full: int,
    num_blocks: int,
    block_size: int,
    block_stride: int,
    row_stride: int,
    row_bytes: int,
    source: NDArray[int32],
    host_rows: NDArray[int64],
) -> None: ...
