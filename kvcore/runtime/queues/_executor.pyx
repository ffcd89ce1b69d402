# SPDX-License-Identifier: Apache-2.0
"""The workers of one device and the lines they advance; ``_queue`` opens with the whole picture.

A line is a queue seen from here: operations in order, and how far a worker has come.  Nothing in
this module looks at who launched them.
"""

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uint64_t

from kvcore.runtime.queues._admission cimport Admission
from kvcore.runtime.queues._marks cimport (
    CALL, DONE, DROPPED, FAILED, PENDING, RECORD, TIMER, WAIT, WORK, Failure, Mark, Op, Waiter,
)

import heapq
from _thread import allocate_lock
from collections import deque

from kvcore.errors import StreamError

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec* t)

#: Operations a worker runs on one line before other ready lines get their turn.
cdef int PATIENCE = 64
cdef object heappush = heapq.heappush
cdef object heappop = heapq.heappop


cdef double now() noexcept:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


cdef class Line:
    """Operations in order and where a worker is in them; a ``Queue`` is one that takes launches.

    failure: why it does not go on, until that was reported to a host.
    promises: marks of external events, not recorded when this line began to wait for them, that
        whatever is queued from now on comes behind; None without any.
    """


@cython.final
cdef class Executor:
    """The ready queues of one device and the workers that advance them.

    launches: operations launched so far, records and waits included.
    failures: failures not reported to any host yet.
    """

    def __init__(self, Admission admission, seed, bint modelled_time):
        self.life = NEW
        self.ready = deque()
        self.parked = []
        self.timers = []
        self.failures = []
        self.calls = {}
        self.lines = []
        self.admission = admission
        self.modelled_time = modelled_time
        self.seeded = seed is not None
        if self.seeded:
            # splitmix64 of the seed, so that 0, 1, 2, ... give unrelated orders
            self.random = <uint64_t>(int(seed) & 0xFFFFFFFFFFFFFFFF)
            self.random = self.random * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL

    # -- what the host may ask

    cdef int worker(self) noexcept:
        """The number of the worker that this thread is; -1 for any other thread."""
        cdef long me = PyThread_get_thread_ident()
        cdef int i
        for i in range(self.num_workers):
            if self.workers[i] == me:
                return i
        return -1

    cdef bint in_worker(self) noexcept:
        if self.worker() >= 0:
            return True
        # a driver runs host functions on threads of its own
        return len(self.calls) > 0 and PyThread_get_thread_ident() in self.calls

    def inside(self):
        """True on a worker of this device, that is inside a host function or a plan."""
        return self.in_worker()

    def calling(self):
        """(line, op) of the host function or the plan that this thread is in, or None."""
        cdef int me = self.worker()
        cdef Line line
        if me >= 0:
            line = self.lines[me]
            if line is None or line.running is None:
                return None
            return line, line.running
        return self.calls.get(PyThread_get_thread_ident())

    def check(self):
        """Raise StreamError unless the device is open and this is not one of its workers."""
        if self.life != OPEN or self.in_worker():
            self.refuse(None)

    def check_process(self):
        """Raise StreamError in a forked child; unlike ``check``, before and after the block too.

        Also keeps the child away from locks that a thread of the parent may have held.
        """
        if self.life == FORKED:
            self.refuse(None)

    cdef int refuse(self, Line line) except -1:
        what = "device" if line is None else f"stream {line.name!r}"
        if self.life == FORKED:
            raise StreamError(
                f"{what}: the device belongs to the process that made it, and this process was "
                "forked from it; make a device of its own in each process",
                argument="device",
            )
        if self.life == NEW:
            raise StreamError(
                f"{what}: the device is not open; use it in a `with` or `async with` block",
                argument="device",
            )
        if self.life == CLOSING:
            raise StreamError(f"{what}: the device is being left", argument="device")
        if self.life == CLOSED:
            raise StreamError(f"{what}: the device is closed", argument="device")
        raise StreamError(
            f"{what}: a host function must not launch, wait, allocate or free on its own device",
            argument="fn",
        )

    def tell(self, Failure failure):
        """The failure was reported to a host."""
        cdef Py_ssize_t i
        failure.seen = True
        for i in range(len(self.failures)):
            if self.failures[i] is failure:
                del self.failures[i]
                return

    # -- workers

    cdef int wake(self) except -1:
        if self.parked:
            self.parked.pop().release()
        return 0

    def work(self):
        """The life of one worker thread."""
        cdef Line line
        cdef object lock = allocate_lock()
        cdef double pause
        cdef int me
        lock.acquire()
        me = self.num_workers
        self.lines.append(None)
        self.workers[me] = PyThread_get_thread_ident()
        self.num_workers += 1
        while True:
            line = self.take()
            if line is not None:
                self.lines[me] = line
                self.advance(line)
                self.lines[me] = None
                line = None
                if self.life == FORKED:
                    return
                continue
            if self.stopping:
                return
            self.parked.append(lock)
            if not self.timers:
                lock.acquire()
                continue
            pause = self.timers[0][0] - now()
            if pause < 0:
                pause = 0
            if not lock.acquire(True, pause):
                if lock in self.parked:
                    self.parked.remove(lock)
                else:
                    lock.acquire()        # another thread has just popped it and releases it next

    cdef Line take(self):
        cdef Py_ssize_t n
        cdef Line line
        if self.timers:
            while self.timers and self.timers[0][0] <= now():
                line = heappop(self.timers)[2]
                line.state = READY
                self.ready.append(line)
        n = len(self.ready)
        if n == 0:
            return None
        if self.seeded and n > 1:
            n = self.draw(n)
            self.ready.rotate(-n)
            line = self.ready.popleft()
            self.ready.rotate(n)
            return line
        return self.ready.popleft()

    cdef Py_ssize_t draw(self, Py_ssize_t n) noexcept:
        # xorshift64*: which ready line is next must not depend on anything but the seed
        self.random ^= self.random >> 12
        self.random ^= self.random << 25
        self.random ^= self.random >> 27
        return <Py_ssize_t>((self.random * 0x2545F4914F6CDD1DULL >> 33) % <uint64_t>n)

    cdef int advance(self, Line line) except -1:
        """Run a line until it is empty, waits, or has had its share.

        What an operation runs may fork.  The child's only thread is then the copy of this worker:
        it goes on in the operation, and nothing else of the queues, which are the parent's, may
        run there.  So ``life`` is looked at behind everything that runs foreign code.
        """
        cdef Op op
        cdef Mark mark
        cdef int patience = 1 if self.seeded else PATIENCE
        line.state = RUNNING
        if line.blocked is not None:
            mark = line.blocked
            line.blocked = None
            line.running = None
            self.after_wait(line, mark)
        elif line.running is not None:       # a timer that is over
            op = line.running
            op.ended = now()
            if self.observer is not None:
                try:
                    self.observer.ran(line, op)
                except BaseException as error:
                    self.broke(line, op, error)
            line.running = None
            line.over += 1
            op = None
            patience -= 1
        while True:
            if self.life == FORKED:
                return 0
            if not line.pending:
                line.state = IDLE
                return 0
            if patience <= 0 and self.ready:
                line.state = READY
                self.ready.append(line)
                return 0
            op = line.pending.popleft()
            line.running = op
            if line.failure is not None or op.number <= line.skip_until:
                self.pass_over(line, op)
            elif op.kind == RECORD:
                op.mark.time = now()
                self.resolve(op.mark, DONE, None)
            elif op.kind == WAIT:
                mark = op.mark
                mark.prepare()
                if mark.outcome == PENDING:
                    mark.waiters.append(line)
                    line.blocked = mark
                    line.state = WAITING
                    return 0
                self.after_wait(line, mark)
            elif op.kind == TIMER and not self.modelled_time:
                if self.observe_start:
                    try:
                        self.observer.starting(line, op)
                    except BaseException as error:
                        self.broke(line, op, error)
                        line.running = None
                        continue
                op.started = now()
                line.state = TIMED
                heappush(self.timers, (op.started + op.us * 1e-6, op.number, line))
                self.wake()                   # a parked worker must learn of the deadline
                return 0
            else:
                patience -= 1
                if self.parked and self.ready:
                    self.wake()
                self.execute(line, op)
                line.over += 1
            line.running = None
            op = None

    cdef int execute(self, Line line, Op op) except -1:
        try:
            if self.observer is not None:
                if self.observe_start:
                    self.observer.starting(line, op)
                op.started = now()
            if op.kind == WORK:
                op.target.run()
            elif op.kind == CALL:
                op.target(*op.args)
            if self.observer is not None and self.life != FORKED:
                op.ended = now()
                self.observer.ran(line, op)
        except BaseException as error:
            if self.life == FORKED:
                # No stream of the child can keep it: it is the thread's, as of any thread.
                raise
            self.broke(line, op, error)
        return 0

    cdef int broke(self, Line line, Op op, object error) except -1:
        """An operation has raised: the line has failed."""
        failure = Failure(error, line.name, op.name)
        self.failures.append(failure)
        line.failure = failure
        line.last = failure
        if self.observer is not None:
            self.observer.skipped(line, op)
        return 0

    cdef int after_wait(self, Line line, Mark mark) except -1:
        if mark.outcome == FAILED and line.failure is None:
            line.failure = mark.failure
            line.last = mark.failure
        return 0

    cdef int pass_over(self, Line line, Op op) except -1:
        """An operation behind a failure."""
        if op.kind == RECORD:
            op.mark.time = now()
            self.resolve(
                op.mark, FAILED, line.failure if line.failure is not None else line.last
            )
        elif op.kind != WAIT and self.observer is not None:
            self.observer.skipped(line, op)
        return 0

    cdef int forget(self, Line line, Op op) except -1:
        """An operation that will never start."""
        if op.kind == RECORD:
            self.resolve(op.mark, DROPPED, None)
        elif op.kind != WAIT and self.observer is not None:
            self.observer.skipped(line, op)
        return 0

    cdef int resolve(self, Mark mark, int outcome, Failure failure) except -1:
        cdef list waiters = mark.waiters
        cdef Line line
        if mark.outcome != PENDING:           # it was given up when the device was left
            return 0
        mark.failure = failure
        mark.outcome = outcome
        mark.waiters = None
        mark.promises = None
        if waiters is None:
            return 0
        for waiter in waiters:
            if isinstance(waiter, Line):
                line = waiter
                line.state = READY
                self.ready.append(line)
        for waiter in waiters:
            if not isinstance(waiter, Line):
                (<Waiter>waiter).notify()
        return 0

    # -- the end

    def open(self):
        self.life = OPEN

    @property
    def is_open(self):
        return self.life == OPEN

    @property
    def is_forked(self):
        return self.life == FORKED

    def closing(self):
        """From here on nothing can be launched."""
        if self.life == OPEN:
            self.life = CLOSING

    def stop(self):
        """Let the workers end once nothing is ready."""
        if self.life != FORKED:
            self.life = CLOSED
        self.stopping = True
        while self.parked:
            self.parked.pop().release()

    def forked(self):
        """This process is a copy: the workers are not here."""
        self.life = FORKED
        self.num_workers = 0
        self.calls.clear()

    def give_up(self, Mark mark, Failure failure):
        """Nobody will record this mark: who waits for it fails, or is dropped (None)."""
        if failure is not None:
            self.failures.append(failure)
        self.resolve(mark, DROPPED if failure is None else FAILED, failure)
        self.wake()

    def wake_one(self):
        """For marks resolved outside a worker."""
        self.wake()
