# SPDX-License-Identifier: Apache-2.0
"""Which instruction set the kernels use, and from how many bytes on they stream.

The best set the CPU has is taken when the module is loaded; select() takes another.  A call that
writes at least stream_bytes() bytes streams, because what it writes does not fit the core's own
cache; the default is five eighths of the second-level cache, since the sources want room there too
(where the two were equally fast on a cache of 2 MiB).
"""

from libc.stdint cimport int64_t

cdef extern from "isa.h" nogil:
    const kv_isa* kv_isas
    int KV_N_ISAS
    bint kv_isa_runs(int i)

cdef extern from *:
    """
    #include <unistd.h>
    static long kv_second_level_bytes(void)
    {
    #ifdef _SC_LEVEL2_CACHE_SIZE
        return sysconf(_SC_LEVEL2_CACHE_SIZE);
    #else
        return 0;
    #endif
    }
    """
    long kv_second_level_bytes() nogil

cdef const kv_isa* chosen = NULL
cdef int64_t threshold = 0


cdef const kv_isa* active() noexcept nogil:
    return chosen


cdef const kv_isa* portable() noexcept nogil:
    return &kv_isas[KV_N_ISAS - 1]


cdef int64_t second_level_bytes() noexcept nogil:
    cdef int64_t count = kv_second_level_bytes()
    return count if count > 0 else 1 << 20


cdef int64_t streaming_threshold() noexcept nogil:
    return threshold


def available():
    """Names of the instruction sets this CPU can run, best first."""
    return tuple([kv_isas[i].name.decode() for i in range(KV_N_ISAS) if kv_isa_runs(i)])


def current():
    """Name of the instruction set in use."""
    return chosen.name.decode()


def stream_bytes():
    """Bytes a call must write to use streaming stores."""
    return threshold


def select(name=None):
    """Use that set, or the best one for None; ValueError lists what this CPU can run."""
    global chosen
    cdef int i
    for i in range(KV_N_ISAS):
        if kv_isa_runs(i) and (name is None or kv_isas[i].name.decode() == name):
            chosen = &kv_isas[i]
            return current()
    raise ValueError(f"expected one of {', '.join(available())} on this CPU, got {name!r}")


def set_stream_bytes(count=None):
    """Move the border between ordinary and streaming stores; None is the default again."""
    global threshold
    if count is None:
        count = second_level_bytes() // 8 * 5
    elif isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 62:
        raise ValueError(f"expected a number of bytes from 0 to 2**62, got {count!r}")
    threshold = count


select()
set_stream_bytes()
