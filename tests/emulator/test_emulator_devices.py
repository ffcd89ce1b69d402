# SPDX-License-Identifier: Apache-2.0
"""Two devices in one process: copies between them, streams of each, tensors of the other device."""

from __future__ import annotations

from typing import Any

import pytest
from wheel import needs_wheel

pytestmark = pytest.mark.timeout(180)  # a fresh process imports torch

PROGRAM = """
import kvcore.emulator
kvcore.emulator.start(devices=2, memory=1 << 28)
import torch, torch_npu
npu = torch.npu
assert npu.device_count() == 2

# Copies, dense and strided, waiting and not.
a = torch.arange(8.0).to("npu:0")
b = a.to("npu:1")
assert b.device.index == 1 and b.cpu().tolist() == list(range(8))
b.zero_()
b.copy_(a, non_blocking=True)
npu.synchronize(1)
assert b.cpu().tolist() == list(range(8))
assert torch.arange(6).to("npu:0")[::2].to("npu:1").cpu().tolist() == [0, 2, 4]
assert a.view(2, 4).t().to("npu:1").cpu().tolist() == a.cpu().view(2, 4).t().tolist()
assert npu.can_device_access_peer(0, 1)

# Operators run where their tensors are, whichever device is current.
assert npu.current_device() == 0
assert (b + 1).device.index == 1 and (b + 1).sum().item() == 36
assert torch_npu.npu_swiglu(b).device.index == 1
assert npu.current_device() == 0
with npu.device(1):
    assert torch.ones(3, device="npu").device.index == 1
    assert (a * 2).device.index == 0
    assert npu.current_device() == 1
for call in (lambda: a + b, lambda: torch.cat([a, b])):
    try:
        call()
    except RuntimeError as error:
        assert "npu:0 and npu:1" in str(error)
    else:
        raise AssertionError("two devices")

# A stream of the second device, and an event that orders the first behind it.
stream = npu.Stream(device=1)
with npu.stream(stream):
    x = torch.ones(1000, device="npu:1")
    for _ in range(20):
        x.add_(1)
    y = x.to("npu:0", non_blocking=True)
    event = stream.record_event()
npu.current_stream(0).wait_event(event)
assert y.sum().item() == 21_000

# Each has its own memory.
free = [npu.mem_get_info(i)[0] for i in range(2)]
held = torch.empty(64 << 20, dtype=torch.uint8, device="npu:1")
assert npu.mem_get_info(0)[0] == free[0] and npu.mem_get_info(1)[0] < free[1]
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="npu:1")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("more than the device has")
npu.synchronize()
assert kvcore.emulator.reports() == [], kvcore.emulator.reports()
print("two devices")
"""


@needs_wheel
def test_two_devices(program: Any) -> None:
    done = program(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "two devices" in done.stdout
