# SPDX-License-Identifier: Apache-2.0
"""Lines of the program as numbers, for the journal of the machine (cann/journal.c).

A thread says which line its calls come from before it makes them; tasks, calls and broken rules are
entered with that number.  Torch_npu makes most calls in a thread of its own, which has no line of
Python: see ``Notes`` in _races.
"""

from libc.stdint cimport uint64_t, uintptr_t

from kvcore.runtime.watching._observe import call_site

cdef set_function set_line = NULL

#: (file, line, operator) of each number; 0 is no line at all.
cdef list places = [("", 0)]
cdef dict numbers = {}


def bind(uintptr_t line):
    """Set the address of the machine's function kvdouble_line."""
    global set_line
    set_line = <set_function>line


cdef uint64_t enter(object name, object site) except 0:
    """The number of this thread's line; where it has none, of ``name``."""
    cdef tuple key = (name, 0) if site is None else (site[0].co_filename, site[1])
    cdef object found = numbers.get(key)
    if found is not None:
        return found
    found = len(places)
    places.append(key)
    numbers[key] = found
    return found


cdef uint64_t here(str name) except 0:
    """The caller's line, or ``name`` in a thread of torch's."""
    return enter(name, call_site())


cdef uint64_t current(str name) except 0:
    """The line that this thread has set; where it has set none, the caller's, or ``name``."""
    cdef uint64_t number = 0
    if set_line != NULL:
        number = set_line(0)
        set_line(number)
    return number if number else here(name)


cdef str text_at(uint64_t number, str name):
    """``name (file:line)``, for what is reported later."""
    file, line = places[number]
    return f"{name} ({file}:{line})" if line else f"{name} ({file})"


def begin(str name):
    """Set this thread's line to its caller's; returns the line before, for ``end``."""
    return 0 if set_line == NULL else set_line(here(name))


def end(uint64_t before):
    """Set the thread's line back to the one that ``begin`` returned."""
    if set_line != NULL:
        set_line(before)


def place(uint64_t number):
    """(file, line) of a number; with line 0 the "file" is a text for calls without a line."""
    return places[number] if number < <uint64_t>len(places) else places[0]


def last():
    """The number of this thread's line; after ``begin`` the one that was just set."""
    cdef uint64_t number
    if set_line == NULL:
        return 0
    number = set_line(0)
    set_line(number)
    return number
