# SPDX-License-Identifier: Apache-2.0
"""The queues: what one launch costs is decided here, so this part is compiled.

Two walks
---------
*A launch.* ``Queue.launch(plan)`` makes an ``Op``, appends it to the queue's deque and, if the
queue was idle, moves the queue to ``Executor.ready``; if a worker is parked it is given its lock.
That is all: no thread is waited for and nothing is awaited.  A worker takes a ready queue and
*advances* it: it pops operations in order and runs them until the queue is empty (idle), until
it meets a wait whose mark is pending (the queue is then put on the mark's list and holds no
thread), or until others have waited long enough (it goes to the back of ``ready``).
A *mark* is one record of an event.  When the record is reached the mark is resolved: queues on
its list become ready again, then hosts on its list are told.

*A failure.* The exception is kept in a ``Failure`` on the queue.  While it is there, operations
are popped but not run, and marks recorded behind it resolve as failed, carrying the same
failure; a queue that waits for a failed mark takes it over.  When a host is told (it
synchronised), the queue forgets the failure, but everything launched up to that moment is still
skipped: what runs and what does not depends on the order of the host's calls, never on how far
the worker had come.

*A drop* (the device is left by an exception or a cancel).  Every operation that has not started
is popped and its mark resolved as dropped, so nobody waits for ever; what runs, runs to its end.

An event hop costs no thread switch
-----------------------------------
Resolving a mark makes queues ready but wakes nobody.  A parked worker is woken only at the
moment a worker is about to *run* something while other queues are ready.  In a ping-pong between
two queues, one worker records, meets the wait, takes the other queue and goes on.

Why there is no lock
--------------------
The extension relies on the GIL: none of the functions that change a queue runs Python code
between its reads and its writes (appending to a deque or a list, popping, releasing a lock are
C calls).  Operations are dropped only when the state is whole again, since dropping one may run
anything.  Workers sleep on locks of their own, so no wake-up can be lost: a worker puts its lock
on ``parked`` in the same breath in which it found ``ready`` empty.
"""

from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint64_t

from kvcore.runtime._marks cimport (
    CALL, DONE, DROPPED, FAILED, PENDING, RECORD, TIMER, WAIT, WORK, Failure, Mark, Op, Waiter,
)
from kvcore.runtime._storage cimport BufferCore, Storage

import heapq
from _thread import allocate_lock
from collections import deque

from kvcore.errors import ParamInvalidError, StreamError

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec* t)

cdef enum State:
    IDLE
    READY
    RUNNING
    WAITING
    TIMED

cdef enum Life:
    NEW
    OPEN
    CLOSING
    CLOSED
    FORKED

#: Operations a worker runs on one queue before other ready queues get their turn.
cdef int PATIENCE = 64
cdef int MAX_WORKERS = 256
cdef object NO_ARGS = ()
cdef object heappush = heapq.heappush
cdef object heappop = heapq.heappop


cdef inline double now() noexcept:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + t.tv_nsec * 1e-9


cdef class EventCore:
    """What the launch path must see of an event: the executor and the last record."""

    cdef readonly Executor executor
    cdef readonly Mark mark

    def _bind(self, Executor executor):
        self.executor = executor


cdef class Queue:
    """The compiled half of a stream; see ``kvcore.runtime.stream.Stream``."""

    cdef readonly Executor executor
    cdef readonly str name
    cdef readonly int index
    cdef object pending
    cdef int state
    cdef Op running
    cdef Mark blocked
    cdef readonly Failure failure
    cdef Failure last
    cdef int64_t skip_until
    cdef public object capture
    cdef object __weakref__

    def _bind(self, Executor executor, str name, int index):
        self.executor = executor
        self.name = name
        self.index = index
        self.pending = deque()
        self.state = IDLE
        self.skip_until = -1

    @property
    def idle(self):
        """True when nothing is queued or running."""
        return self.at_rest()

    cdef inline bint at_rest(self) noexcept:
        # A host that was told by the last record may ask before the worker has put the queue
        # down; there is nothing left to run all the same.
        cdef Op op = self.running
        if self.state == IDLE:
            return True
        if self.pending:
            return False
        return op is None or (op.kind == RECORD and op.mark.outcome != PENDING)

    def launch(self, plan):
        """Queue one run of a plan and return at once.

        The plan, and through it its arrays, stay alive until the run is over.  Contents are
        read when it runs.  Errors of the run reach the host at the next synchronise.
        Raises StreamError (device closed, buffer freed or foreign), ParamInvalidError (not a
        plan, or memory that a kernel on this device cannot reach).
        """
        cdef Executor executor = self.executor
        cdef Op op
        if executor.life != OPEN or executor.in_worker():
            executor.refuse(self)
        executor.admit(plan)
        if self.capture is not None:
            self.capture.add(self, WORK, plan, None, 0.0)
            return
        op = Op.__new__(Op)
        op.kind = WORK
        op.target = plan
        self.submit(op)

    def _launch_unchecked(self, plan):
        """A copy of our own making: its memory was looked at when it was made."""
        cdef Op op
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        if self.capture is not None:
            self.capture.add(self, WORK, plan, None, 0.0)
            return
        op = Op.__new__(Op)
        op.kind = WORK
        op.target = plan
        self.submit(op)

    def _call(self, fn, args):
        cdef Op op
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        if self.capture is not None:
            self.capture.add(self, CALL, fn, args, 0.0)
            return
        op = Op.__new__(Op)
        op.kind = CALL
        op.target = fn
        op.args = args
        self.submit(op)

    def _timer(self, double us, str name):
        cdef Op op
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        if self.capture is not None:
            self.capture.add(self, TIMER, name, None, us)
            return
        op = Op.__new__(Op)
        op.kind = TIMER
        op.target = name
        op.us = us
        self.submit(op)

    def _again(self, int kind, target, args, double us, note):
        """Submit one operation of a graph; the note says where it was captured."""
        cdef Op op = Op.__new__(Op)
        op.kind = kind
        op.target = target
        op.args = args
        op.us = us
        op.note = note
        self.submit(op)

    def _record(self, EventCore event):
        """Record the event behind everything launched here; the event's mark is replaced."""
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        if event.executor is not self.executor:
            raise _foreign_event(self.name)
        if self.capture is not None:
            event.mark = self.capture.record(self)
            return
        if self.executor.observer is not None:
            self.executor.observer.event_call()
        event.mark = self.mark()

    def _wait(self, EventCore event):
        """Hold back what is launched from here on until the event's last record is reached."""
        cdef Mark mark
        cdef Executor executor = self.executor
        if executor.life != OPEN or executor.in_worker():
            executor.refuse(self)
        if event.executor is not executor:
            raise _foreign_event(self.name)
        mark = event.mark
        if mark is None:
            if executor.observer is not None:
                executor.observer.waited_for_nothing(self)
            return
        if mark.graph is not None or self.capture is not None:
            if executor.graph_wait(self, mark):
                return
        if executor.observer is not None:
            executor.observer.event_call()
        self._wait_mark(mark)

    def _wait_mark(self, Mark mark):
        """Hold back what is launched from here on until the mark is reached."""
        cdef Op op
        if mark.queue is self:
            return
        op = Op.__new__(Op)
        op.kind = WAIT
        op.mark = mark
        if self.executor.observer is None:
            if mark.outcome != DONE and mark.outcome != DROPPED:
                self.push(op)
            return
        self.executor.lock.acquire()
        try:
            self.executor.observer.waited(self, mark)
            if mark.outcome != DONE and mark.outcome != DROPPED:
                self.push(op)
        finally:
            self.executor.lock.release()

    cpdef Mark mark(self):
        """A mark behind everything launched here so far."""
        cdef Op op = Op.__new__(Op)
        cdef Mark mark = Mark.__new__(Mark)
        mark.queue = self
        op.kind = RECORD
        op.mark = mark
        if self.executor.observer is None:
            self.place(op)
            return mark
        self.executor.lock.acquire()
        try:
            self.executor.observer.marked(self, mark)
            self.place(op)
        finally:
            self.executor.lock.release()
        return mark

    cdef int place(self, Op op) except -1:
        """Queue a record; on an idle queue it is reached at once, and no worker is troubled."""
        cdef Mark mark = op.mark
        if not self.at_rest():
            self.push(op)
            return 0
        mark.time = now()
        if self.failure is not None:
            mark.failure = self.failure
            mark.outcome = FAILED
        else:
            mark.outcome = DONE
        return 0

    cdef int submit(self, Op op) except -1:
        cdef Executor executor = self.executor
        if executor.observer is None:
            self.push(op)
            return 0
        # Two hosts may launch on one queue: clocks must be given in the order of the queue.
        executor.lock.acquire()
        try:
            op.number = executor.launches
            executor.observer.launched(self, op)
            self.push(op)
        finally:
            executor.lock.release()
        return 0

    cdef int push(self, Op op) except -1:
        cdef Executor executor = self.executor
        op.number = executor.launches
        executor.launches += 1
        self.pending.append(op)
        if self.state == IDLE:
            self.state = READY
            executor.ready.append(self)
            executor.wake()
        return 0

    def _told(self, Failure failure):
        """The host has been told of this queue's failure: the queue is usable again.

        False when this queue had no failure left to tell.
        """
        if self.failure is None or (failure is not None and failure is not self.failure):
            return False
        self.executor.tell(self.failure)
        self.failure = None
        self.skip_until = self.executor.launches - 1
        return True

    def _detach(self):
        """Take away, in one step, all that has not started; what runs, runs to its end."""
        fresh = deque()
        gone = self.pending
        self.pending = fresh
        return gone

    def _forget(self, gone):
        """Resolve what was taken away: nobody may wait for it for ever."""
        cdef Op op
        while gone:
            op = gone.popleft()
            self.executor.forget(self, op)


cdef object _foreign_event(str stream):
    return ParamInvalidError(
        "event: expected an event of the stream's own device, got one of another device",
        argument="event",
        expected=f"an event of the device of stream {stream!r}",
    )


cdef class Executor:
    """The ready queues of one device and the workers that advance them.

    launches: operations launched so far, records and waits included.
    failures: failures that no host has been told of yet.
    """

    cdef readonly int life
    cdef readonly int64_t launches
    cdef object ready
    cdef list parked
    cdef list timers
    cdef bint stopping
    cdef public object observer
    cdef public bint observe_start
    cdef public object lock
    cdef public list failures
    cdef public object refuse_memory
    cdef public object graph_wait
    cdef public bint modelled
    cdef bint modelled_time
    cdef bint seeded
    cdef uint64_t random
    cdef dict calls
    cdef dict types
    cdef long[256] workers
    cdef int num_workers
    cdef public object key
    cdef object __weakref__

    def __init__(self, object key, seed, bint modelled, bint modelled_time):
        self.life = NEW
        self.ready = deque()
        self.parked = []
        self.timers = []
        self.failures = []
        self.calls = {}
        self.types = {}
        self.key = key
        self.modelled = modelled
        self.modelled_time = modelled_time
        self.seeded = seed is not None
        if self.seeded:
            # splitmix64 of the seed, so that 0, 1, 2, ... give unrelated orders
            self.random = <uint64_t>(int(seed) & 0xFFFFFFFFFFFFFFFF)
            self.random = self.random * 0x9E3779B97F4A7C15ULL + 0x632BE59BD9B4E019ULL

    # -- what the host may ask

    cdef bint in_worker(self) noexcept:
        cdef long me = PyThread_get_thread_ident()
        cdef int i
        for i in range(self.num_workers):
            if self.workers[i] == me:
                return True
        return False

    def inside(self):
        """True on a worker of this device, that is inside a host function or a plan."""
        return self.in_worker()

    def calling(self):
        """(queue, op) of the host function this thread is in, or None."""
        return self.calls.get(PyThread_get_thread_ident())

    def check(self):
        """Raise StreamError unless the device is open and this is not one of its workers."""
        if self.life != OPEN or self.in_worker():
            self.refuse(None)

    cdef int refuse(self, Queue queue) except -1:
        what = "device" if queue is None else f"stream {queue.name!r}"
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

    cdef int learn(self, object plan) except -1:
        """What plans of this type tell: nothing, accesses, or a tuple of arrays as well."""
        cdef int told = 0
        kind = type(plan)
        if kind is type or not callable(getattr(plan, "run", None)):
            raise ParamInvalidError(
                f"plan: expected an object with run(), got {kind.__name__}",
                argument="plan", seen=kind.__name__, expected="a plan",
            )
        if hasattr(plan, "reads") and hasattr(plan, "writes"):
            told = 2 if isinstance(getattr(plan, "arrays", None), tuple) else 1
        self.types[kind] = told
        return told

    cdef int admit(self, object plan) except -1:
        """Raise when the plan touches memory that it must not."""
        cdef object found = self.types.get(type(plan))
        cdef int told = self.learn(plan) if found is None else found
        if told == 2:
            # Accesses may be dear to make; only the owners matter here.
            for owner in plan.arrays:
                if owner is not None and not self.reachable(owner):
                    break
            else:
                return 0
        if told:
            self.admit_all(plan.reads)
            self.admit_all(plan.writes)
        return 0

    cdef bint reachable(self, object owner) noexcept:
        cdef Storage storage
        if isinstance(owner, BufferCore):
            storage = (<BufferCore>owner).storage
            return (not storage.freed and storage.owner is self.key
                    and not (self.modelled and storage.space == "host"))
        return not self.modelled

    cdef int admit_all(self, object accesses) except -1:
        for access in accesses:
            if not self.reachable(access.owner):
                self.refuse_memory(access.argument, access.owner)
        return 0

    def tell(self, Failure failure):
        """A host has been told of this failure."""
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
        cdef Queue queue
        cdef object lock = allocate_lock()
        cdef double pause
        lock.acquire()
        self.workers[self.num_workers] = PyThread_get_thread_ident()
        self.num_workers += 1
        while True:
            queue = self.take()
            if queue is not None:
                self.advance(queue)
                queue = None
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
                    lock.acquire()        # somebody has just popped it and is about to release

    cdef Queue take(self):
        cdef Py_ssize_t n
        cdef Queue queue
        if self.timers:
            while self.timers and self.timers[0][0] <= now():
                queue = heappop(self.timers)[2]
                queue.state = READY
                self.ready.append(queue)
        n = len(self.ready)
        if n == 0:
            return None
        if self.seeded and n > 1:
            n = self.draw(n)
            self.ready.rotate(-n)
            queue = self.ready.popleft()
            self.ready.rotate(n)
            return queue
        return self.ready.popleft()

    cdef Py_ssize_t draw(self, Py_ssize_t n) noexcept:
        # xorshift64*: which ready queue is next must not depend on anything but the seed
        self.random ^= self.random >> 12
        self.random ^= self.random << 25
        self.random ^= self.random >> 27
        return <Py_ssize_t>((self.random * 0x2545F4914F6CDD1DULL >> 33) % <uint64_t>n)

    cdef int advance(self, Queue queue) except -1:
        """Run a queue until it is empty, waits, or has had its share."""
        cdef Op op
        cdef Mark mark
        cdef int patience = 1 if self.seeded else PATIENCE
        queue.state = RUNNING
        if queue.blocked is not None:
            mark = queue.blocked
            queue.blocked = None
            queue.running = None
            self.after_wait(queue, mark)
        elif queue.running is not None:       # a timer that is over
            op = queue.running
            op.ended = now()
            if self.observer is not None:
                self.observer.ran(queue, op)
            queue.running = None
            op = None
            patience -= 1
        while True:
            if not queue.pending:
                queue.state = IDLE
                return 0
            if patience <= 0 and self.ready:
                queue.state = READY
                self.ready.append(queue)
                return 0
            op = queue.pending.popleft()
            queue.running = op
            if queue.failure is not None or op.number <= queue.skip_until:
                self.pass_over(queue, op)
            elif op.kind == RECORD:
                op.mark.time = now()
                self.resolve(op.mark, DONE, None)
            elif op.kind == WAIT:
                mark = op.mark
                mark.prepare()
                if mark.outcome == PENDING:
                    mark.waiters.append(queue)
                    queue.blocked = mark
                    queue.state = WAITING
                    return 0
                self.after_wait(queue, mark)
            elif op.kind == TIMER and not self.modelled_time:
                op.started = now()
                queue.state = TIMED
                heappush(self.timers, (op.started + op.us * 1e-6, op.number, queue))
                self.wake()                   # a parked worker must learn of the deadline
                return 0
            else:
                patience -= 1
                if self.parked and self.ready:
                    self.wake()
                self.execute(queue, op)
            queue.running = None
            op = None

    cdef int execute(self, Queue queue, Op op) except -1:
        cdef long me
        try:
            if self.observer is None:
                if op.kind == WORK:
                    op.target.run()
                    return 0
            else:
                if self.observe_start:
                    self.observer.starting(queue, op)
                op.started = now()
                if op.kind == WORK:
                    op.target.run()
            if op.kind == CALL:
                me = PyThread_get_thread_ident()
                self.calls[me] = (queue, op)
                try:
                    op.target(*op.args)
                finally:
                    del self.calls[me]
            if self.observer is not None:
                op.ended = now()
                self.observer.ran(queue, op)
        except BaseException as error:
            failure = Failure(error, queue.name, op.name)
            self.failures.append(failure)
            queue.failure = failure
            queue.last = failure
            if self.observer is not None:
                self.observer.skipped(queue, op)
        return 0

    cdef int after_wait(self, Queue queue, Mark mark) except -1:
        if mark.outcome == FAILED and queue.failure is None:
            queue.failure = mark.failure
            queue.last = mark.failure
        return 0

    cdef int pass_over(self, Queue queue, Op op) except -1:
        """An operation behind a failure."""
        if op.kind == RECORD:
            op.mark.time = now()
            self.resolve(
                op.mark, FAILED, queue.failure if queue.failure is not None else queue.last
            )
        elif op.kind != WAIT and self.observer is not None:
            self.observer.skipped(queue, op)
        return 0

    cdef int forget(self, Queue queue, Op op) except -1:
        """An operation that will never start."""
        if op.kind == RECORD:
            self.resolve(op.mark, DROPPED, None)
        elif op.kind != WAIT and self.observer is not None:
            self.observer.skipped(queue, op)
        return 0

    cdef int resolve(self, Mark mark, int outcome, Failure failure) except -1:
        cdef list waiters = mark.waiters
        cdef Queue queue
        mark.failure = failure
        mark.outcome = outcome
        mark.waiters = None
        if waiters is None:
            return 0
        for waiter in waiters:
            if isinstance(waiter, Queue):
                queue = waiter
                queue.state = READY
                self.ready.append(queue)
        for waiter in waiters:
            if not isinstance(waiter, Queue):
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

    def wake_one(self):
        """For marks resolved outside a worker."""
        self.wake()
