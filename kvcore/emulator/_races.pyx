# SPDX-License-Identifier: Apache-2.0
"""The machine's journal, read: who touched which bytes without order, and which rules were broken.

The machine enters launches, records, waits and what each touches in the order of the calls
(cann/journal.c).  They go through the clocks and the shadow that the runtime's own devices have
(``kvcore.runtime.watching``): a stream is a lane, the host is one lane with all its
threads.  An entry is taken when all before it are: which bytes an index chose is known when its
task has run, and the entries behind that wait.  So what is found depends on the order of the
launches alone, and not on which task ran first.
"""

cimport cython
from cpython cimport array
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from kvcore.runtime.watching._order cimport Note
from kvcore.runtime.watching._watch cimport Accessor, Watch

import array
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque

from kvcore.emulator import _lines as lines

cdef array.array NUMBERS = array.array("q")
cdef object get_ident = threading.get_ident

cdef enum:
    TASK = 1
    DONE = 2
    MARK = 3
    WAIT = 4
    JOIN = 5
    DROP = 6
    HOST = 7
    FREE = 8
    NEW = 9
    RULE = 10
    GRAPH = 11
    NODE = 12
    FORGET = 13

cdef enum:
    RANGE_WRITE = 1
    RANGE_SPAN = 2
    MOST_NOTES = 1024   # of calls on one address that were not entered yet

cdef enum:
    FOUND_WRITE = 1     # Shadow's HIT_WRITE

cdef enum:
    PINNED = 1      # enum place of the machine
    DEVICE = 2

cdef struct Entry:
    uint64_t kind, number, stream, device, mark, line, id, thread
    const char* symbol
    const char* section
    char* text
    size_t first_range, num_ranges
    int code
    bint late

cdef struct Range:
    uint64_t start, end, flags

ctypedef size_t (*read_function)(void** entries, void** ranges) noexcept nogil
ctypedef uint64_t (*task_function)() noexcept nogil


@cython.final
@cython.no_gc  # it holds numbers and texts, and many wait at once
@cython.freelist(512)
cdef class Item:
    """One entry on its way: what it touches, and whether that is known yet."""

    cdef int kind
    cdef uint64_t number, mark, line, thread, graph
    cdef int lane
    cdef bint ready
    cdef str name, section, text
    cdef array.array reads, writes


@cython.final
cdef class Known:
    """A mark whose clock is known, in the form that Order.waited takes."""

    cdef readonly object note

    def __cinit__(self, note):
        self.note = note


cdef array.array both(array.array one, array.array other):
    """The pairs of two arrays, either may be None."""
    cdef array.array made
    if one is None:
        return other
    if other is not None:
        made = array.copy(one)
        array.extend(made, other)
        return made
    return one


cdef class Found(Watch):
    """A watch that calls a function with each pair of unordered accesses."""

    cdef object report, race

    def __init__(self, report, race):
        self.report = report
        self.race = race

    def found(self, hits, record, argument, write, owner):
        groups = {}
        for other, start, end, flag in hits:
            groups.setdefault((other, flag), []).append((start, end))
        for (number, flag), shared in groups.items():
            self.race(self.records[number][0], flag == FOUND_WRITE, record, write, argument, shared,
                      self.report)

    cdef int touch(self, Item item, Note note, Accessor record, str argument) except -1:
        if item.reads is not None and len(item.reads):
            self.access(pairs(item.reads), False, note.lane, note.count, note.host, note.vector,
                        record, argument, None)
        if item.writes is not None and len(item.writes):
            self.access(pairs(item.writes), True, note.lane, note.count, note.host, note.vector,
                        record, argument, None)
        return 0

    cdef int launch(self, Item item, int lane, str stream) except -1:
        cdef Note note = Note(item.line)
        cdef uint64_t number = item.number
        self.launched(lane, note, number)
        del self.in_flight[number]
        return self.touch(item, note, Accessor(item.name, stream, item.line, number), "")


cdef const int64_t[:, :] pairs(array.array numbers):
    cdef Py_ssize_t n = len(numbers) // 2
    return <int64_t[:n, :2]><int64_t*>numbers.data.as_longlongs


@cython.final
cdef class Branches(Found):
    """The order inside one graph: each chain of nodes is a lane, and joins order them.

    Only its first replay is checked, once it is known what every node touches.
    """

    cdef list shape, lane_of, stamps
    cdef uint64_t first
    cdef readonly int count

    def __init__(self, list shape, uint64_t number, report, race):
        Found.__init__(self, report, race)
        self.shape = shape
        self.first = number + 1
        self.lane_of = []
        self.stamps = []
        tails = {}
        for i, (before, _) in enumerate(shape):
            lane = self.lane_of[before - 1] if before else 0
            if not before or tails[lane] != before - 1:
                self.count += 1
                lane = self.count
                self.lane(lane, f"branch {lane} of the graph")
            self.lane_of.append(lane)
            tails[lane] = i

    cdef bint part(self, Item item) except -1:
        """Enter a node and the nodes before it; True when it was the last one."""
        cdef Py_ssize_t i = item.number - self.first
        if item.number < self.first or i >= len(self.shape):
            return False  # of another replay
        while len(self.stamps) <= i:
            here = len(self.stamps)
            lane = self.lane_of[here]
            for other in self.shape[here]:
                if other and self.lane_of[other - 1] != lane:
                    self.waited(lane, Known(self.stamps[other - 1]))
            if here == i:
                self.launch(item, lane, self.lanes[lane].name)
            self.stamps.append(self.marked(lane))
        return i + 1 == len(self.shape)


@cython.final
cdef class Races(Found):
    """What one process did on its machine.

    rule:     called with (section, text, place) for each broken rule.
    race:     called with (first, second, ranges ...), see reports.py.
    tasks:    how many tasks were looked at.
    races, memory, init: whether order, frees and first reads are looked at.
    timing:   who computes model time from the entries, see timing.py; None: nobody.
    """

    cdef read_function fetch
    cdef task_function current
    cdef object rule, free_found, unwritten
    cdef object backlog
    cdef dict streams, marks, unknown, waiting, names, told, graphs, by_host
    cdef list stream_names, stream_devices
    cdef list pinned_starts, pinned_ends
    cdef list written_starts, written_ends
    cdef dict notes
    cdef object busy
    cdef uint64_t reader
    cdef int64_t device_start, device_end
    cdef set joined_threads
    cdef public bint check_order, check_memory, check_reads
    cdef public uint64_t tasks
    cdef public object timing

    def __init__(self, report, race, rule, free_found, unwritten, uintptr_t fetch,
                 uintptr_t current, int64_t device_start, int64_t device_end):
        Found.__init__(self, report, race)
        self.rule = rule
        self.free_found = free_found
        self.unwritten = unwritten
        self.fetch = <read_function>fetch
        self.current = <task_function>current
        self.device_start = device_start
        self.device_end = device_end
        self.told = {}
        self.notes = {}
        self.check_order = self.check_memory = True
        self.begin()

    def begin(self):
        """Forget everything: the process begins, also as a forked child."""
        self.busy = threading.Lock()
        self.reader = 0
        self.backlog = deque()
        self.streams = {}
        self.stream_names = ["the host"]
        self.stream_devices = [-1]
        self.marks = {}
        self.unknown = {}
        self.waiting = {}
        self.names = {}
        self.graphs = {}
        self.by_host = {}
        self.pinned_starts = []
        self.pinned_ends = []
        self.written_starts = []
        self.written_ends = []
        self.joined_threads = set()
        self.tasks = 0

    # -- reading

    def read(self):
        """Read what the machine has entered; True when this thread has waited for the device."""
        return self.read_and(None)

    cdef bint read_and(self, Item item) except -1:
        """Read what the machine has entered, and then take an item of the host's own."""
        cdef bint waited = False
        cdef uint64_t mine = get_ident()
        if self.reader == mine:  # what a report does, or a collection meanwhile
            return False
        self.busy.acquire()
        self.reader = mine
        try:
            while self.take():
                pass
            if item is not None:
                self.backlog.append(item)
                self.advance()
            if self.joined_threads and mine in self.joined_threads:
                self.joined_threads.discard(mine)
                waited = True
        finally:
            self.reader = 0
            self.busy.release()
        return waited

    def pending(self):
        """How many entries wait for a task to have run."""
        return len(self.backlog)

    def tables(self):
        """Sizes of everything that is remembered, by name.

        A program that repeats itself makes none of them grow, except ``records``, from which what
        is not needed any more is removed now and then.
        """
        return {
            "backlog": len(self.backlog),
            "by_host": len(self.by_host),
            "graphs": len(self.graphs),
            "in_flight": len(self.in_flight),
            "marks": len(self.marks),
            "names": len(self.names),
            "notes": sum([len(lines) for lines in self.notes.values()]),
            "pinned": len(self.pinned_starts),
            "records": len(self.records),
            "streams": len(self.streams),
            "told": len(self.told),
            "unknown": len(self.unknown),
            "waiting": len(self.waiting),
            "written": len(self.written_starts),
        }

    cdef bint take(self) except -1:
        cdef void* entries = NULL
        cdef void* ranges = NULL
        cdef Entry* entry
        cdef size_t i
        cdef size_t n = self.fetch(&entries, &ranges)
        for i in range(n):
            entry = &(<Entry*>entries)[i]
            self.enter_one(entry, (<Range*>ranges) + entry.first_range)
        return n != 0

    cdef str name_of(self, const char* text):
        cdef object key = <uintptr_t>text
        cdef object found = self.names.get(key)
        if found is None:
            # Interned or part of a library: the address stands for the text.
            # A task of Python's has its line in its name, for errors.
            found = self.names[key] = text.decode("utf-8", "replace").partition(" (")[0]
        return found

    cdef int lane_of(self, uint64_t stream, uint64_t device) except -1:
        cdef object found = self.streams.get(stream)
        if found is not None:
            return found
        cdef int lane = len(self.stream_names)
        cdef int before = self.stream_devices.count(device)
        self.streams[stream] = lane
        self.stream_names.append(f"stream {before} of npu:{device}")
        self.stream_devices.append(device)
        self.lane(lane, self.stream_names[lane])
        return lane

    cdef int split(self, Item item, Entry* entry, Range* ranges) except -1:
        cdef size_t i, reads = 0, writes = 0
        cdef Range* r
        for i in range(entry.num_ranges):
            if not ranges[i].flags & RANGE_SPAN:
                if ranges[i].flags & RANGE_WRITE:
                    writes += 1
                else:
                    reads += 1
        if reads:
            item.reads = array.clone(NUMBERS, 2 * reads, False)
        if writes:
            item.writes = array.clone(NUMBERS, 2 * writes, False)
        reads = writes = 0
        for i in range(entry.num_ranges):
            r = &ranges[i]
            if r.flags & RANGE_SPAN:
                continue
            if r.flags & RANGE_WRITE:
                item.writes.data.as_longlongs[2 * writes] = r.start
                item.writes.data.as_longlongs[2 * writes + 1] = r.end
                writes += 1
            else:
                item.reads.data.as_longlongs[2 * reads] = r.start
                item.reads.data.as_longlongs[2 * reads + 1] = r.end
                reads += 1
        return 0

    cdef int enter_one(self, Entry* entry, Range* ranges) except -1:
        cdef Item item
        cdef int kind = entry.kind
        if kind == DONE:
            item = self.waiting.pop(entry.number, None)
            if item is not None:
                self.finish(item, entry, ranges)
            return self.advance()
        if kind == NODE:
            self.graphs.setdefault(entry.number, []).append((entry.mark, entry.stream))
            return 0
        item = Item.__new__(Item)
        item.kind = kind
        item.number = entry.number
        item.mark = entry.mark
        item.line = entry.line
        item.thread = entry.thread
        item.ready = True
        if kind == TASK:
            item.lane = self.lane_of(entry.stream, entry.device)
            item.name = self.name_of(entry.symbol)
            item.graph = entry.mark
            self.split(item, entry, ranges)
            if entry.late:
                item.ready = False
                self.waiting[entry.number] = item
        elif kind == MARK or kind == WAIT or kind == GRAPH:
            item.lane = self.lane_of(entry.stream, entry.device)
            item.name = self.name_of(entry.symbol)
        elif kind == HOST or kind == FREE or kind == NEW:
            item.name = self.name_of(entry.symbol)
            item.lane = entry.code
            self.split(item, entry, ranges)
        elif kind == RULE:
            item.section = self.name_of(entry.section)
            item.text = entry.text.decode("utf-8", "replace")
        if self.backlog:
            self.backlog.append(item)
            return 0
        if not item.ready:
            self.backlog.append(item)
            return 0
        return self.work(item)

    cdef int finish(self, Item item, Entry* entry, Range* ranges) except -1:
        """A late task has run: these are the bytes that it used."""
        cdef Item own = Item.__new__(Item)
        self.split(own, entry, ranges)
        item.reads = both(own.reads, item.reads)
        item.writes = both(own.writes, item.writes)
        more = self.told.get(entry.id) if entry.id else None
        if more:
            for numbers, write in more.popleft():
                if write:
                    item.writes = both(item.writes, numbers)
                else:
                    item.reads = both(item.reads, numbers)
        if entry.id and more is not None and not more:
            del self.told[entry.id]
        for numbers, write in self.by_host.pop(entry.number, ()):
            if write:
                item.writes = both(item.writes, numbers)
            else:
                item.reads = both(item.reads, numbers)
        item.ready = True
        return 0

    cdef int advance(self) except -1:
        cdef Item item
        while self.backlog:
            item = self.backlog[0]
            if not item.ready:
                return 0
            self.backlog.popleft()
            self.work(item)
        return 0

    # -- what an entry means

    cdef int work(self, Item item) except -1:
        cdef int kind = item.kind
        if self.timing is not None:
            self.timed(item)
        if kind == TASK:
            return self.task(item)
        if kind == MARK:
            return self.mark(item)
        if kind == WAIT:
            known = self.marks.get(item.mark)
            if known is not None:
                self.waited(item.lane, known)
            else:  # of a replay that is still to come: no order is known yet, so no report
                self.unknown.setdefault(item.mark, []).append(item.lane)
                for lane in range(1, len(self.stream_names)):
                    self.waited(item.lane, Known(self.marked(lane)))
        elif kind == JOIN:
            known = self.marks.get(item.mark)
            self.joined_threads.add(item.thread)
            if known is not None and self.joined(known.note) and self.records:
                self.forget()
        elif kind == DROP:
            self.marks.pop(item.mark, None)
            self.unknown.pop(item.mark, None)
        elif kind == HOST:
            self.host_item(item, "")
        elif kind == FREE:
            self.freed(item)
        elif kind == NEW:
            if item.lane == PINNED:
                insort(self.pinned_starts, item.writes[0])
                insort(self.pinned_ends, item.writes[1])
            else:
                self.erase(item.writes[0], item.writes[1])
        elif kind == RULE:
            self.rule(item.section, item.text, lines.place(item.line))
        elif kind == GRAPH:
            self.replay(item)
        elif kind == FORGET:
            self.graphs.pop(item.mark, None)  # which was never replayed
        return 0

    cdef int timed(self, Item item) except -1:
        """Model time goes on by an entry."""
        cdef int kind = item.kind
        if kind == TASK:
            self.timing.task(item.lane, item.name, item.reads, item.writes, item.number,
                             item.graph != 0)
        elif kind == MARK:
            self.timing.mark(item.lane, item.mark, item.name)
        elif kind == WAIT:
            self.timing.wait(item.lane, item.mark)
        elif kind == JOIN:
            self.timing.join(item.mark)
        elif kind == DROP:
            self.timing.drop(item.mark)
        elif kind == GRAPH:
            self.timing.replayed()
        elif kind == HOST:
            self.timing.waits(item.name, item.reads, item.writes)
        return 0

    def stream_name(self, int lane):
        """What a lane is called in reports and traces."""
        return self.stream_names[lane]

    cdef int mark(self, Item item) except -1:
        stamp = self.marked(item.lane)
        self.marks[item.mark] = known = Known(stamp)
        for lane in self.unknown.pop(item.mark, ()):
            self.waited(lane, known)
        return 0

    cdef int task(self, Item item) except -1:
        cdef str stream = self.stream_names[item.lane]
        self.tasks += 1
        if not item.line:
            item.line = self.noted(item)
        elif self.notes:
            self.used(item)
        if self.check_reads:
            self.first_reads(item, stream)
        if self.check_order:
            self.launch(item, item.lane, stream)
        if item.graph:
            self.graph_part(item)
        return 0

    cdef int host_item(self, Item item, str argument) except -1:
        if self.notes and item.line:
            self.used(item)
        if self.check_reads:
            self.first_reads(item, "the host")
        if not self.check_order:
            return 0
        self.host_count += 1
        cdef Accessor record = Accessor(item.name, "the host", item.line, INFINITY)
        if item.reads is not None:
            self.access(pairs(item.reads), False, 0, self.host_count, self.host_count,
                        self.host_vector, record, argument, None)
        if item.writes is not None:
            self.access(pairs(item.writes), True, 0, self.host_count, self.host_count,
                        self.host_vector, record, argument, None)
        return 0

    cdef int freed(self, Item item) except -1:
        """Memory is freed: an access that is not ordered before that is a use after free."""
        cdef int64_t start = item.writes.data.as_longlongs[0]
        cdef int64_t end = item.writes.data.as_longlongs[1]
        if self.check_memory and self.check_order:
            self.race, race = self.free_found, self.race
            try:
                self.host_item(item, "free")
            finally:
                self.race = race
        self.shadow.clear(start, end)
        self.erase(start, end)
        if item.lane == PINNED:
            i = bisect_left(self.pinned_starts, start)
            if i < len(self.pinned_starts) and self.pinned_starts[i] == start:
                del self.pinned_starts[i]
                del self.pinned_ends[i]
        return 0

    # -- replays: within a graph the order of its branches counts, not that of the replay

    cdef int replay(self, Item item) except -1:
        shape = self.graphs.get(item.mark)
        if type(shape) is list:  # its first replay
            branches = Branches(shape, item.number, self.report, self.race)
            if branches.count > 1:
                self.graphs[item.mark] = branches
            else:
                del self.graphs[item.mark]
        return 0

    cdef int graph_part(self, Item item) except -1:
        branches = self.graphs.get(item.graph)
        if branches is not None and (<Branches>branches).part(item):
            del self.graphs[item.graph]
        return 0

    # -- lines of calls that torch_npu makes in a thread of its own

    def note(self, uint64_t address, uint64_t line):
        """Note that a call from this line has written, or will write, to this address."""
        found = self.notes.get(address)
        if found is None:
            if len(self.notes) > 65536:
                self.notes.clear()
            found = self.notes[address] = deque((0,), MOST_NOTES)
        found.append(line)

    cdef int used(self, Item item) except -1:
        """Drop the note of a call that was entered with its line: no later call may use it."""
        cdef Py_ssize_t i
        if item.writes is None:
            return 0
        for i in range(0, min(8, len(item.writes)), 2):
            found = self.notes.get(item.writes[i])
            if found is not None and len(found) > 1 and item.line == found[1]:
                found.popleft()
        return 0

    cdef uint64_t noted(self, Item item) except? 0:
        """The line of the oldest call that has written there and was not entered yet; after it the
        same again, for a call of which the machine makes several.
        """
        if item.writes is None or not len(item.writes):
            return 0
        found = self.notes.get(item.writes[0])
        if found is None:
            return 0
        if len(found) > 1:
            found.popleft()
        return found[0]

    # -- what the host does by itself

    def has_pinned(self):
        """Whether there is pinned memory at all."""
        return bool(self.pinned_starts)

    def in_task(self):
        """Whether this thread runs a host function of a stream."""
        return self.current() != 0

    def is_pinned(self, int64_t address):
        """Whether an address is one of pinned memory."""
        cdef Py_ssize_t i = bisect_right(self.pinned_starts, address)
        return i > 0 and address < self.pinned_ends[i - 1]

    def host_touches(self, str name, uint64_t line, numbers, bint write):
        """Enter what torch's own operator on the host touches, in a host function or outside."""
        cdef Item item
        cdef uint64_t number = self.current()
        if number:
            self.by_host.setdefault(number, []).append((numbers, write))
            return
        item = Item.__new__(Item)
        item.kind = HOST
        item.name = name
        item.line = line
        item.ready = True
        if write:
            item.writes = numbers
        else:
            item.reads = numbers
        self.read_and(item)

    def tell(self, uint64_t number, ranges):
        """Enter the bytes that a Python task uses in this run: [(array of pairs, write), ...]."""
        found = self.told.get(number)
        if found is None:
            found = self.told[number] = deque()
        found.append(ranges)

    # -- bytes that nobody has written

    def fresh(self, int64_t start, int64_t end):
        """Memory is allocated: what was written there before does not count any more."""
        cdef Item item = Item.__new__(Item)
        item.kind = NEW
        item.lane = DEVICE
        item.ready = True
        item.writes = array.array("q", (start, end))
        self.read_and(item)

    cdef int erase(self, int64_t start, int64_t end) except -1:
        """Take a range out of what is written."""
        cdef list starts = self.written_starts
        cdef list ends = self.written_ends
        cdef Py_ssize_t i = bisect_right(ends, start)
        cdef Py_ssize_t k = i
        left = right = None
        while k < len(starts) and starts[k] < end:
            if starts[k] < start:
                left = (starts[k], start)
            if ends[k] > end:
                right = (end, ends[k])
            k += 1
        if k > i:
            kept = [part for part in (left, right) if part is not None]
            starts[i:k] = [part[0] for part in kept]
            ends[i:k] = [part[1] for part in kept]
        return 0

    cdef int fill(self, int64_t start, int64_t end) except -1:
        """Add a range to what is written."""
        cdef list starts = self.written_starts
        cdef list ends = self.written_ends
        cdef Py_ssize_t i = bisect_left(ends, start)
        cdef Py_ssize_t k = i
        while k < len(starts) and starts[k] <= end:
            start = min(start, starts[k])
            end = max(end, ends[k])
            k += 1
        starts[i:k] = [start]
        ends[i:k] = [end]
        return 0

    cdef int first_reads(self, Item item, str stream) except -1:
        cdef Py_ssize_t i, k
        cdef int64_t start, end
        if item.reads is not None:
            for i in range(0, len(item.reads), 2):
                start = item.reads[i]
                end = item.reads[i + 1]
                if not self.device_start <= start < self.device_end:
                    continue  # memory of the host, whose writes are not entered
                k = bisect_right(self.written_ends, start)
                if (k >= len(self.written_starts) or self.written_starts[k] > start
                        or self.written_ends[k] < end):
                    self.unwritten(item.name, stream, lines.place(item.line), start, end)
                    self.fill(start, end)  # reported once
        if item.writes is not None:
            for i in range(0, len(item.writes), 2):
                self.fill(item.writes[i], item.writes[i + 1])
        return 0
