# SPDX-License-Identifier: Apache-2.0
"""Happens-before: where launches, records and the host's accesses stand, by vector clocks.

Every stream is a lane and counts its launches; the host is lane 0 and counts its own accesses.
Order is known at launch, since everything that orders work is a call of the host:

* an operation comes after what its lane's vector has reached;
* a record keeps the vector of its lane, a wait joins it into the waiting lane;
* a host that synchronised joins the vector into its own, and every launch joins the host's.

The one exception is a wait for a record that has yet to be made (``external``): the mark is
*late*, its clock is taken over when it is known, and that is before anything behind the wait runs.

The host is one lane, whatever tasks and threads it has: how these order their own calls cannot
be seen from here, and a correct program must not be accused.

A vector is an array that is never changed once made, so that operations, marks and lanes share
it; a lane's own count and the host's count are kept apart from it.
"""

cimport cython
from libc.stdint cimport int64_t

from kvcore.runtime.queues._marks cimport Mark
from kvcore.runtime.watching._vectors cimport Vector


@cython.final
@cython.freelist(256)
cdef class Note:
    """What is known of one operation: where it was launched and its place in every clock.

    site:      the caller's code and line.  node: the model clock's.  checksums: of sources.
    lane, count, host, vector, late: its place in the order.
    """

    def __cinit__(self, site):
        self.site = site


@cython.final
@cython.freelist(64)
cdef class Stamp:
    """The clock of a record: its lane, the lane's count, the vector, and what is late.

    host: the host's accesses before it; of interest to who waited for it before it was made.
    """

    def __cinit__(self, int lane, int64_t count, Vector vector, int64_t host, tuple late):
        self.lane = lane
        self.count = count
        self.vector = vector
        self.host = host
        self.late = late


@cython.final
cdef class StreamClock:
    """One stream: launches so far, what they come after, marks whose clocks are not known yet."""

    def __cinit__(self, str name):
        self.name = name
        self.vector = Vector()
        self.late = ()


cdef class Order:
    """The clocks of one device.  Everything is called with the device's lock held.

    lanes:     by stream; lane 0 is the host's and not used.
    in_flight: vectors of the operations that have not run yet, by launch.
    """

    def __cinit__(self, *args, **options):
        self.lanes = [StreamClock("the host")]
        self.in_flight = {}
        self.host_vector = Vector()

    def lane(self, int index, str name):
        """A stream was made."""
        while len(self.lanes) <= index:
            self.lanes.append(StreamClock(name))
        self.lanes[index] = StreamClock(name)

    cdef StreamClock at(self, int index):
        """A lane that knows what the host has waited for."""
        cdef StreamClock lane = self.lanes[index]
        if lane.host_version != self.host_version:
            lane.vector = lane.vector.join(self.host_vector, 0, 0)
            lane.host_version = self.host_version
        if lane.late:
            self.settle(lane)
        return lane

    cpdef launched(self, int index, Note note, number):
        """Give an operation its place in the order."""
        cdef StreamClock lane = self.at(index)
        lane.count += 1
        note.count = lane.count
        note.lane = index
        note.vector = lane.vector
        note.late = lane.late
        note.host = self.host_count
        self.in_flight[number] = lane.vector

    cpdef marked(self, int index):
        """The clock of a record."""
        cdef StreamClock lane = self.at(index)
        return Stamp(index, lane.count, lane.vector, self.host_count, lane.late)

    cpdef waited(self, int index, mark):
        """A lane waits for a record, made already or not."""
        cdef StreamClock lane = self.at(index)
        if mark.note is not None:
            self.follow(lane, mark.note)
        elif mark not in lane.late:
            lane.late += (mark,)

    cdef int follow(self, StreamClock lane, Stamp stamp) except -1:
        if not lane.vector.reached(stamp.vector, stamp.lane, stamp.count):
            lane.vector = lane.vector.join(stamp.vector, stamp.lane, stamp.count)
        if stamp.late:
            lane.late += tuple([mark for mark in stamp.late if mark not in lane.late])
        return 0

    cdef int settle(self, StreamClock lane) except -1:
        """Take over the clocks of late marks that have been recorded by now."""
        cdef Mark mark
        cdef list known = [mark for mark in lane.late if mark.note is not None]
        while known:
            lane.late = tuple([mark for mark in lane.late if mark.note is None])
            for mark in known:
                self.follow(lane, mark.note)
            known = [mark for mark in lane.late if mark.note is not None]
        return 0

    cdef int fold(self, Note note) except -1:
        """Take over the late marks behind an operation that runs: these have been recorded."""
        reached = self.reached(note.vector, note.host, note.late)
        note.vector, note.host = reached
        note.late = ()
        return 0

    def reached(self, Vector vector, int64_t host, tuple late):
        """A clock and late marks behind it, joined."""
        cdef list pending = list(late)
        cdef set done = set()
        cdef Stamp stamp
        while pending:
            mark = pending.pop()
            stamp = mark.note
            if stamp is not None and id(mark) not in done:
                done.add(id(mark))
                host = max(host, stamp.host)
                if not vector.reached(stamp.vector, stamp.lane, stamp.count):
                    vector = vector.join(stamp.vector, stamp.lane, stamp.count)
                pending += stamp.late
        return vector, host

    def joined(self, Stamp stamp):
        """The host has waited for a record; True when that was all there is."""
        cdef Vector vector = stamp.vector
        cdef StreamClock lane
        if stamp.late:
            vector = self.reached(vector, 0, stamp.late)[0]
        if not self.host_vector.reached(vector, stamp.lane, stamp.count):
            self.host_vector = self.host_vector.join(vector, stamp.lane, stamp.count)
            self.host_version += 1
        if self.in_flight:
            return False
        vector = self.host_vector
        for i in range(1, len(self.lanes)):
            lane = self.lanes[i]
            if vector[i] < lane.count:
                return False
        return True

    def floor(self):
        """(host, vector): the least clock that any access still to come can have."""
        cdef Vector vector = self.host_vector
        cdef int64_t host = self.host_count
        for flying in list(self.in_flight.values()):
            if flying is not vector:
                vector = vector.meet(flying)
                host = 0
        return host, vector
