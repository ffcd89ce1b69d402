# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "../_core/dlpack.h":
    ctypedef struct kv_dl_device:
        int32_t device_type
        int32_t device_id
    ctypedef struct kv_dl_type:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct kv_dl_tensor:
        void* data
        kv_dl_device device
        int32_t ndim
        kv_dl_type dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct kv_dl_managed:
        kv_dl_tensor dl_tensor
        void (*deleter)(kv_dl_managed*) noexcept
    ctypedef struct kv_dl_versioned:
        uint32_t major
        uint64_t flags
        kv_dl_tensor dl_tensor
        void (*deleter)(kv_dl_versioned*) noexcept
    ctypedef struct kv_dl_exchange:
        uint32_t major
        void* tensor_from_object
    int kv_peek(kv_dl_exchange* table, void* object, kv_dl_tensor* out) noexcept
