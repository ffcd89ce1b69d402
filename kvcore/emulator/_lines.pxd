# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

ctypedef uint64_t (*set_function)(uint64_t) noexcept nogil

cdef set_function set_line
cdef uint64_t enter(object name, object site) except 0
cdef uint64_t here(str name) except 0
cdef uint64_t current(str name) except 0
cdef str text_at(uint64_t number, str name)
