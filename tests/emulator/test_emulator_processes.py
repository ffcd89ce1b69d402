# SPDX-License-Identifier: Apache-2.0
"""Children, forks, ends: what a process inherits of the machine, and that none of them hangs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from wheel import needs_wheel

from kvcore.emulator import environment

Program = Callable[..., "subprocess.CompletedProcess[str]"]
# Each of these processes imports torch, some one below another.
pytestmark = [needs_wheel, pytest.mark.timeout(300)]

START = """
import os, subprocess, sys
import kvcore.emulator
kvcore.emulator.start(memory=1 << 28)
import torch, torch_npu
"""
CHILD = "import torch; print((torch.ones(3, device='npu') + 1).sum().item())"


def asked() -> dict[str, str]:
    made: dict[str, str] = {}
    environment.apply(environment.Settings(memory=1 << 28), made)
    return made


def test_a_child_without_the_environment_s_python_is_a_machine(program: Program) -> None:
    """-I: neither PYTHONPATH nor the folder of the program is looked in."""
    done = program(CHILD, "-I", **asked())
    assert done.stdout == "6.0\n", done.stderr


def test_two_levels_of_children(program: Program) -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"
    text = f"""{START}
x = torch.ones(3, device='npu') + 1
inner = {inner!r}
subprocess.run([sys.executable, "-c", inner], check=True)
print(x.sum().item())
"""
    done = program(text)
    assert done.stdout.split() == ["6.0", "6.0"], done.stderr


def test_torch_npu_that_is_imported_by_name(program: Program) -> None:
    text = "import torch, torch_npu; print((torch.ones(3, device='npu') + 1).sum().item())"
    done = program(text, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **asked())
    assert done.stdout == "6.0\n", done.stderr


def test_workers_of_a_data_loader(program: Program) -> None:
    text = f"""{START}
import torch.utils.data
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((2,), float(i))
if __name__ == "__main__":
    held = torch.ones(3, device="npu") + 1
    for way, workers in (("fork", 2), ("spawn", 1)):
        loader = torch.utils.data.DataLoader(
            Data(), 4, num_workers=workers, multiprocessing_context=way
        )
        print(sum(batch.npu().sum().item() for batch in loader))
    print(held.sum().item())
"""
    # spawn needs a file to import.
    done = program(
        "import pathlib, runpy, sys, tempfile\n"
        f"path = pathlib.Path(tempfile.mkdtemp(), 'main.py'); path.write_text({text!r})\n"
        "sys.argv = [str(path)]; runpy.run_path(str(path), run_name='__main__')\n"
    )
    assert done.stdout.split() == ["56.0", "56.0", "6.0"], done.stderr


# A child begins, and what it does is followed by the status that its parent sees.
FORK = """
child = os.fork()
if child == 0:
    {inside}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
USE = "print((torch.ones(3, device='npu') + 1).sum().item(), flush=True); os._exit(0)"
REFUSED = """
    try:
        torch.ones(3, device='npu') + 1
    except RuntimeError as error:
        print("forked" in str(error), flush=True)
    os._exit(0)
"""


def test_forked_children(program: Program) -> None:
    """Before a device is open a child may use one; later it may end, and is refused a device."""
    text = f"""{START}
torch.npu.device_count()
{FORK.format(inside=USE)}
x = torch.ones(3, device="npu") + 2
{FORK.format(inside="os._exit(0)")}
{FORK.format(inside="sys.exit(0)")}
{FORK.format(inside=REFUSED)}
print(x.sum().item())
"""
    done = program(text)
    assert done.stdout.split() == ["6.0", "0", "0", "0", "True", "0", "9.0"], done.stderr


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "os._exit(0)"])
def test_a_process_ends_with_work_queued(program: Program, end: str) -> None:
    text = f"""{START}
x = torch.ones(3, device="npu")
for _ in range(1000):
    x.mul_(1.0)
{end}
"""
    done = program(text)
    assert done.returncode == 0, done.stderr


def test_the_gil_is_given_back(program: Program) -> None:
    """Waits behind a thousand operators and a host function, by two threads, in every way."""
    text = f"""{START}
import threading
x = torch.ones(64, device="npu")
stream = torch.npu.Stream()
seen = []
def work():
    for _ in range(4):
        y = x
        for _ in range(250):
            y = y * 1.0
        event = torch.npu.Event()
        event.record()
        torch.npu.empty_cache()
        event.synchronize()
        try:
            torch.empty(1 << 30, dtype=torch.int8, device="npu")
        except torch.OutOfMemoryError:
            seen.append("out of memory")
        torch.npu.synchronize()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(seen), x.sum().item())
"""
    done = program(text)
    assert done.stdout.split() == ["8", "64.0"], done.stderr


def test_expandable_segments(program: Program) -> None:
    text = f"""{START}
torch.npu.empty_cache()
held = [torch.full((3 << 20,), float(i), device="npu") for i in range(4)]
del held[1]
more = torch.full((7 << 20,), 9.0, device="npu")
print([x[-1].item() for x in (*held, more)], torch.npu.memory_reserved() >= 64 << 20)
del held, more
torch.npu.empty_cache()
print(torch.npu.memory_reserved(), kvcore.emulator.reports())
"""
    done = program(text, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert done.stdout.splitlines() == ["[0.0, 2.0, 3.0, 9.0] True", "0 []"], done.stderr


def test_collectives_of_one_rank(program: Program) -> None:
    text = f"""{START}
import torch.distributed as dist
dist.init_process_group("hccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:29511")
x = torch.arange(4.0, device="npu")
dist.all_reduce(x)
out = [torch.zeros(4, device="npu")]
dist.all_gather(out, x)
dist.broadcast(x, 0)
dist.barrier()
print(x.cpu().tolist(), out[0].cpu().tolist())
dist.destroy_process_group()
"""
    done = program(text)
    assert done.stdout.splitlines() == ["[0.0, 1.0, 2.0, 3.0] [0.0, 1.0, 2.0, 3.0]"], done.stderr
