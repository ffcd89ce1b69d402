# SPDX-License-Identifier: Apache-2.0
"""The queues: what one launch costs is decided here, so this part is compiled.

Two walks
---------
*A launch.* ``Stream.launch(plan)`` makes an ``Op``, appends it to the queue's deque and, if the
queue was idle, moves the queue to ``Executor.ready``; if a worker is parked it is given its lock.
That is all: no thread is waited for and nothing is awaited.  A worker takes a ready queue and
*advances* it: it pops operations in order and runs them until the queue is empty (idle), until
it meets a wait whose mark is pending (the queue is then put on the mark's list and holds no
thread), or until others have waited long enough (it goes to the back of ``ready``).
A *mark* is one record of an event.  When the record is reached the mark is resolved: queues on
its list become ready again, then hosts on its list are woken.

*A failure.* The exception is kept in a ``Failure`` on the queue.  While it is there, operations
are popped but not run, and marks recorded behind it resolve as failed, carrying the same
failure; a queue that waits for a failed mark takes it over.  When it is reported to a host (that
synchronised), the queue forgets the failure, but everything launched up to that moment is still
skipped: what runs and what does not depends on the order of the host's calls, never on how far
the worker had come.

*A drop* (the device is left by an exception or a cancel).  Every operation that has not started
is popped and its mark resolved as dropped, so no wait lasts for ever; what runs, runs to its end.

An event hop costs no thread switch
-----------------------------------
Resolving a mark makes queues ready but wakes no thread.  A parked worker is woken only at the
moment a worker is about to *run* something while other queues are ready.  In a ping-pong between
two queues, one worker records, meets the wait, takes the other queue and goes on.

Why there is no lock
--------------------
The extension relies on the GIL: none of the functions that change a queue runs Python code
between its reads and its writes (appending to a deque or a list, popping, releasing a lock are
C calls).  Operations are dropped only when the state is whole again, since dropping one may run
anything.  Workers sleep on locks of their own, so no wake-up can be lost: a worker puts its lock
on ``parked`` before any Python code can run after it found ``ready`` empty.
"""

cimport cython

from kvcore.runtime.queues._executor cimport IDLE, OPEN, READY, Executor, Line, now
from kvcore.runtime.queues._marks cimport (
    CALL, DONE, DROPPED, FAILED, PENDING, RECORD, TIMER, WAIT, WORK, Failure, Mark, Op,
)

from collections import deque

from kvcore.errors import ParamInvalidError


cdef class EventCore:
    """What the launch path must see of an event: the executor and the last record."""

    cdef readonly Executor executor
    cdef readonly Mark mark

    def _bind(self, Executor executor):
        self.executor = executor


@cython.final
cdef class Queue(Line):
    """What one stream was given and has not done yet, in order.

    executor: the workers of its device.
    capture:  the graph that launches are recorded into, or None.
    lane:     the driver's lane (``kvcore.runtime.abc.Lane``) that work is handed over to; None
              where the workers run it themselves, as those of the model do.
    owner:    the device, which lives as long as there is work for a worker to come to.
    """

    cdef readonly Executor executor
    cdef public object capture
    cdef readonly object lane
    cdef object owner

    def __init__(self, Executor executor, str name, int index, owner):
        self.executor = executor
        self.owner = owner
        self.name = name
        self.index = index
        self.pending = deque()
        self.state = IDLE
        self.skip_until = -1

    def attach(self, lane):
        """Hand work over to this lane from now on."""
        self.lane = lane

    @property
    def idle(self):
        """True when nothing is queued or running, and the lane has nothing left."""
        return self.at_rest() if self.lane is None else self.lane.idle

    @property
    def rests(self):
        """True when nothing is queued or running here, whatever a lane still has."""
        return self.at_rest()

    @property
    def num_queued(self):
        """Operations that no worker has come to yet; records and waits are none."""
        cdef Op op
        cdef Py_ssize_t found = 0
        for op in tuple(self.pending):
            found += op.kind != RECORD and op.kind != WAIT
        return found

    @property
    def num_running(self):
        """Operations that a worker, or a timer, has begun and not ended: one or none."""
        cdef Op op = self.running
        return int(op is not None and op.kind != RECORD and op.kind != WAIT)

    @property
    def num_over(self):
        """Operations that workers have run; to a driver's lane, handed over."""
        return self.over

    @property
    def waits(self):
        """True while the next operation is held back by a mark that is not settled."""
        cdef Mark mark = self.blocked
        return mark is not None and mark.outcome == PENDING

    cdef inline bint at_rest(self) noexcept:
        # A host that was woken by the last record may ask before the worker has put the queue
        # down; there is nothing left to run all the same.
        cdef Op op = self.running
        if self.state == IDLE:
            return True
        if self.pending:
            return False
        return op is None or (op.kind == RECORD and op.mark.outcome != PENDING)

    # -- work

    def move(self, plan):
        """Queue a copy or a fill: its memory was looked at when it was made."""
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        self.begin(WORK, plan, None, 0.0)

    def call(self, fn, args):
        """Queue fn(*args)."""
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        self.begin(CALL, fn, args, 0.0)

    def timer(self, double us, target):
        """Queue work that only takes time."""
        if self.executor.life != OPEN or self.executor.in_worker():
            self.executor.refuse(self)
        self.begin(TIMER, target, None, us)

    cdef int begin(self, int kind, target, args, double us) except -1:
        cdef Op op
        if self.lane is not None:
            self.lane.check(kind, target)
        if self.capture is not None:
            self.capture.add(self, kind, target, args, us)
            return 0
        op = Op.__new__(Op)
        op.kind = kind
        op.target = target
        op.args = args
        op.us = us
        self.submit(op)
        return 0

    def again(self, int kind, target, args, double us, note):
        """Submit one operation of a graph; the note says where it was captured."""
        cdef Op op = Op.__new__(Op)
        op.kind = kind
        op.target = target
        op.args = args
        op.us = us
        op.note = note
        self.submit(op)

    # -- order

    def record(self, EventCore event):
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
        if self.lane is None:
            event.mark = self.mark()
        else:
            event.mark = self.lane.place(event.enable_timing)

    def wait(self, EventCore event):
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
        self.wait_mark(mark)

    def wait_mark(self, Mark mark):
        """Hold back what is launched from here on until the mark is reached."""
        cdef Op op
        if mark.queue is self:
            return
        if mark.promises is not None or mark.queue is None:
            self.follow(mark)
        if self.lane is not None:
            self.lane.wait_mark(mark)
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
        cdef Mark mark
        if self.lane is not None:
            return self.lane.mark()
        mark = Mark.__new__(Mark)
        self.record_here(mark)
        return mark

    def record_mark(self, Mark mark):
        """Record a mark behind everything launched here; others may wait for it already."""
        if self.lane is not None:
            self.lane.record_mark(mark)
        else:
            self.record_here(mark)

    cdef int record_here(self, Mark mark) except -1:
        cdef Op op = Op.__new__(Op)
        mark.queue = self
        if self.promises is not None:
            mark.promises = self.still_promised()
        op.kind = RECORD
        op.mark = mark
        if self.executor.observer is None:
            self.place(op)
            return 0
        self.executor.lock.acquire()
        try:
            self.executor.observer.marked(self, mark)
            self.place(op)
        finally:
            self.executor.lock.release()
        return 0

    cdef int follow(self, Mark mark) except -1:
        cdef list found = list(self.still_promised() or ())
        cdef Mark promise
        for promise in (mark,) if mark.queue is None else mark.promises or ():
            if promise.outcome == PENDING and promise not in found:
                found.append(promise)
        self.promises = tuple(found) if found else None
        return 0

    cdef tuple still_promised(self):
        """``promises`` without those that have been reached since."""
        cdef list left = []
        cdef Mark promise
        if self.promises is not None:
            for promise in self.promises:
                if promise.outcome == PENDING:
                    left.append(promise)
            if len(left) < len(self.promises):
                self.promises = tuple(left) if left else None
        return self.promises

    def comes_behind(self, Mark mark):
        """Whether what is queued here waits, by however many streams, for a record of the mark.

        Such a record would wait for itself.  A mark that is recorded by now knows what it comes
        behind in its turn.
        """
        cdef list path = list(self.promises or ())
        cdef list seen = []
        cdef Mark promise
        while path:
            promise = path.pop()
            if promise is mark:
                return True
            if promise.outcome == PENDING and promise not in seen:
                seen.append(promise)
                path += promise.promises or ()
        return False

    cdef int place(self, Op op) except -1:
        """Queue a record; on an idle queue it is reached at once, and no worker is troubled."""
        cdef Mark mark = op.mark
        cdef bint awaited
        if not self.at_rest():
            self.push(op)
            return 0
        mark.time = now()
        awaited = mark.waiters is not None
        self.executor.resolve(mark, DONE if self.failure is None else FAILED, self.failure)
        if awaited:
            self.executor.wake()
        return 0

    cdef int submit(self, Op op) except -1:
        cdef Executor executor = self.executor
        if self.lane is not None:
            return self.submit_to_lane(op)
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

    cdef int submit_to_lane(self, Op op) except -1:
        """Queue what the lane has made of an operation: run() hands it over."""
        cdef Executor executor = self.executor
        cdef Op wait
        op.target, done = self.lane.prepare(op.kind, op.target, op.args, op.us)
        op.args = ()
        if executor.observer is None and done is None:
            self.push(op)
            return 0
        executor.lock.acquire()           # nothing may come between an operation and its wait
        try:
            if executor.observer is not None:
                op.number = executor.launches
                executor.observer.launched(self, op)
            self.push(op)
            if done is not None:
                wait = Op.__new__(Op)
                wait.kind = WAIT
                wait.mark = done
                self.push(wait)
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

    def told(self, Failure failure):
        """The failure was reported to the host: the queue is usable again.

        False when this queue had no failure left to report.
        """
        return self.usable_again(failure) if self.lane is None else self.lane.told(failure)

    def usable_again(self, Failure failure):
        """Do what ``told`` does for the queue alone; called by a lane, which has its own part."""
        if self.failure is None or (failure is not None and failure is not self.failure):
            return False
        self.executor.tell(self.failure)
        self.failure = None
        self.skip_until = self.executor.launches - 1
        return True

    def detach(self):
        """Take away, in one step, all that has not started; what runs, runs to its end."""
        fresh = deque()
        gone = self.pending
        self.pending = fresh
        return gone

    def forget(self, gone):
        """Resolve what was taken away, so that no wait for it lasts for ever."""
        cdef Op op
        while gone:
            op = gone.popleft()
            self.executor.forget(self, op)


cdef class StreamCore:
    """The compiled part of a stream; see ``kvcore.runtime.stream.Stream``.

    queue: the stream's queue, which the modules of the runtime work on.
    """

    cdef readonly Queue queue

    def _bind(self, Queue queue):
        self.queue = queue

    @property
    def name(self):
        """The stream's name, the only one of its device."""
        return self.queue.name

    @property
    def index(self):
        """The stream's number in traces and reports; 0 is the host."""
        return self.queue.index

    @property
    def failure(self):
        """Why the stream does not go on, until that was reported to a host; None while it does."""
        return self.queue.failure

    @property
    def idle(self):
        """True when nothing is queued or running."""
        return self.queue.idle

    def launch(self, plan):
        """Queue one run of a plan and return at once.

        plan: of an operator, or any object with ``run()``, which a worker calls.  What else it
        may have (see docs/runtime.md): ``name``; ``reads`` and ``writes``, sequences of accesses
        (``argument``, ``owner``, ``ranges``; ``kvcore.runtime.Access`` makes them), which are
        looked at here and are the whole of what a run may touch; ``touched()``, the same two of
        the last run, asked for behind it; ``bytes_moved`` and ``num_descriptors``.
        ``buffer.host()`` inside ``run`` is an access of this stream.

        The plan, and through it its arrays, stay alive until the run is over.  Contents are
        read when it runs.  Errors of the run reach the host at the next synchronise.
        Raises StreamError (device closed, buffer freed or foreign), ParamInvalidError (not a
        plan, or memory that a kernel on this device cannot reach).
        """
        cdef Queue queue = self.queue
        cdef Executor executor = queue.executor
        cdef Op op
        if executor.life != OPEN or executor.in_worker():
            executor.refuse(queue)
        executor.admission.admit(plan)
        if queue.lane is not None or queue.capture is not None:
            queue.begin(WORK, plan, None, 0.0)
            return
        op = Op.__new__(Op)
        op.kind = WORK
        op.target = plan
        queue.submit(op)


cdef object _foreign_event(str stream):
    return ParamInvalidError(
        "event: expected an event of the stream's own device, got one of another device",
        argument="event",
        expected=f"an event of the device of stream {stream!r}",
    )
