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
    #include <string.h>
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

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #include <cpuid.h>
    #endif
    /* The vendor's twelve letters, family and model as x86 counts them; zeros elsewhere. */
    static void kv_which_cpu(char *vendor, int *family, int *model)
    {
        memset(vendor, 0, 13);
        *family = *model = 0;
    #if defined(__x86_64__) || defined(__i386__)
        unsigned a, b, c, d;
        if (!__get_cpuid(0, &a, &b, &c, &d))
            return;
        memcpy(vendor, &b, 4);
        memcpy(vendor + 4, &d, 4);
        memcpy(vendor + 8, &c, 4);
        if (!__get_cpuid(1, &a, &b, &c, &d))
            return;
        *family = a >> 8 & 15;
        *model = a >> 4 & 15;
        if (*family == 15 || *family == 6)
            *model |= a >> 12 & 0xf0;
        if (*family == 15)
            *family += a >> 20 & 255;
    #endif
    }
    """
    void kv_which_cpu(char* vendor, int* family, int* model) nogil

cdef const kv_isa* chosen = NULL
cdef int64_t threshold = 0


cdef const kv_isa* active() noexcept nogil:
    return chosen


cdef const kv_isa* portable() noexcept nogil:
    return &kv_isas[KV_N_ISAS - 1]


cdef int64_t second_level_bytes() noexcept nogil:
    # What no such cache has is taken for a wrong answer.
    cdef int64_t count = kv_second_level_bytes()
    return count if 1 << 16 <= count <= 1 << 26 else 1 << 20


cdef int64_t streaming_threshold() noexcept nogil:
    return threshold


def cpu():
    """Vendor, family and model of an x86 CPU; ("", 0, 0) on others."""
    cdef char vendor[13]
    cdef int family = 0, model = 0
    kv_which_cpu(vendor, &family, &model)
    return vendor.decode("ascii", "replace"), family, model


def second_level():
    """Bytes of the second-level cache: as the system says (0 or less: it does not), as assumed."""
    return kv_second_level_bytes(), second_level_bytes()


def available():
    """Names of the instruction sets this CPU can run, best first."""
    names = [kv_isas[i].name.decode() for i in range(KV_N_ISAS) if kv_isa_runs(i)]
    return tuple(dict.fromkeys(names))


def current():
    """Name of the instruction set in use."""
    return chosen.name.decode()


def path():
    """How rows go past the cache: "lines", "near" or "all"; isa.h says what these are."""
    return chosen.path.decode()


def stream_bytes():
    """Bytes a call must write to use streaming stores."""
    return threshold


def paths(name):
    """Names of the paths that this instruction set has, the first of them the usual one."""
    return tuple([
        kv_isas[i].path.decode() for i in range(KV_N_ISAS) if kv_isas[i].name.decode() == name
    ])


def select(name=None, path=None):
    """Use that set, or the best one for None; ValueError lists what this CPU can run.

    path: "lines", "near" or "all"; a set that has no such path, or None, takes its first.
    """
    global chosen
    cdef int i
    cdef const kv_isa* found = NULL
    for i in range(KV_N_ISAS):
        if kv_isa_runs(i) and (name is None or kv_isas[i].name.decode() == name):
            if found != NULL and kv_isas[i].name.decode() != found.name.decode():
                break
            if found == NULL or kv_isas[i].path.decode() == path:
                found = &kv_isas[i]
    if found == NULL:
        raise ValueError(f"expected one of {', '.join(available())} on this CPU, got {name!r}")
    chosen = found
    return current()


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
