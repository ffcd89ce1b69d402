// SPDX-License-Identifier: Apache-2.0
// Addresses and memory apart (CANN's acl/acl_rt.h): what torch_npu's expandable segments are made
// of.  A reservation is one block, and a tensor in it may lie over several pieces of memory.
// Memory that is mapped goes with its place: it can be mapped once, and its bytes are gone when it
// is unmapped.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

struct physical {
    struct handle handle;
    size_t size;
    int device;
    struct block *at;  // where it is mapped
    size_t offset;
};

static struct block *reserved(void *address, const char *what, int *code) {
    struct block *b;
    kvd_find(address, &b);
    if (b && b->mapped) return b;
    *code = violate(RT_PARAM_INVALID, "virtual memory", "%s: %p is no reserved address", what, address);
    return NULL;
}

int aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted,
                           uint64_t flags) {
    // torch_npu's allocator asks for addresses before it has set a device.
    int code = enter("aclrtReserveMemAddress", INIT, "%zu, %zu, %p, %llu", size, alignment, wanted,
                     (unsigned long long)flags);
    if (code) return leave(code);
    if (!address || !size || size > SIZE_MAX / 2)
        return leave(violate(RT_PARAM_INVALID, "virtual memory", "%zu bytes", size));
    size = (size + GRANULE - 1) / GRANULE * GRANULE;
    uintptr_t at = kvd_reserve(size, GRANULE);
    if (!at) return leave(error(RT_MEMORY_ALLOCATION, "no addresses for %zu bytes", size));
    kvd_add_reserved(at, size, kvd_context() ? kvd_context()->device : 0);
    *address = (void *)at;
    return leave(OK);
}

static void find_in(void *physical, void *data) {
    struct physical *p = physical;
    void **search = data;
    if (p->at == search[0]) search[1] = p;
}

int aclrtReleaseMemAddress(void *address) {
    int code = enter("aclrtReleaseMemAddress", INIT | AFTER, "%p", address);
    struct block *b = code ? NULL : reserved(address, "virPtr", &code);
    if (!b) return leave(code);
    void *search[2] = {b, NULL};
    kvd_each(H_PHYSICAL, find_in, search);
    if (b->start != (uintptr_t)address || search[1])
        return leave(violate(RT_PARAM_INVALID, "virtual memory", "%p is %s", address,
                             search[1] ? "still mapped" : "not the start of its reservation"));
    kvd_forget_reserved(b);
    return leave(OK);
}

int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags) {
    int code = enter("aclrtMallocPhysical", RUNTIME, "%zu, %llu", size, (unsigned long long)flags);
    if (code) return leave(code);
    if (!handle || !properties || !size || size % GRANULE)
        return leave(violate(RT_PARAM_INVALID, "virtual memory", "%zu bytes: whole 2 MiB", size));
    *handle = NULL;
    int device = kvd_context()->device;
    if (!kvd_charge(device, size))
        return leave(error(RT_MEMORY_ALLOCATION, "%zu bytes of device memory wanted", size));
    struct physical *p = kvd_create(H_PHYSICAL, sizeof *p);
    p->size = size;
    p->device = device;
    *handle = p;
    return leave(OK);
}

int aclrtFreePhysical(void *handle) {
    int code = enter("aclrtFreePhysical", RUNTIME | AFTER, "%p", handle);
    if (code) return leave(code);
    struct physical *p = kvd_check(handle, H_PHYSICAL, "handle");
    if (!p) return leave(RT_INVALID_HANDLE);
    if (p->at) return leave(violate(RT_PARAM_INVALID, "virtual memory", "the memory is still mapped"));
    kvd_uncharge(p->device, p->size);
    kvd_destroy(p);
    return leave(OK);
}

int aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags) {
    int code = enter("aclrtMapMem", RUNTIME, "%p, %zu, %zu, %p, %llu", address, size, offset, handle,
                     (unsigned long long)flags);
    struct block *b = code ? NULL : reserved(address, "virPtr", &code);
    if (!b) return leave(code);
    struct physical *p = kvd_check(handle, H_PHYSICAL, "handle");
    if (!p) return leave(RT_INVALID_HANDLE);
    size_t at = (uintptr_t)address - b->start;
    if (offset || size != p->size || at % GRANULE || size > b->size - at)
        return leave(violate(RT_PARAM_INVALID, "virtual memory",
                             "%zu bytes at %p from offset %zu, of memory of %zu", size, address, offset,
                             p->size));
    if (p->at) return leave(error(RT_FEATURE_NOT_SUPPORT, "memory is mapped in one place at a time"));
    for (size_t i = at / GRANULE; i < (at + size) / GRANULE; i++)
        if (b->mapped[i]) return leave(violate(RT_PARAM_INVALID, "virtual memory", "mapped already"));
    memset(b->mapped + at / GRANULE, 1, size / GRANULE);
    kvd_journal_block(ENTRY_NEW, b, at, size);
    p->at = b;
    p->offset = at;
    return leave(OK);
}

struct place_of {
    struct block *block;
    size_t offset;
    struct physical *found;
};

static void match(void *physical, void *data) {
    struct physical *p = physical;
    struct place_of *wanted = data;
    if (p->at == wanted->block && p->offset == wanted->offset) wanted->found = p;
}

int aclrtUnmapMem(void *address) {
    int code = enter("aclrtUnmapMem", RUNTIME | AFTER, "%p", address);
    struct block *b = code ? NULL : reserved(address, "virPtr", &code);
    if (!b) return leave(code);
    struct place_of wanted = {b, (uintptr_t)address - b->start, NULL};
    kvd_each(H_PHYSICAL, match, &wanted);
    struct physical *p = wanted.found;
    if (!p) return leave(violate(RT_PARAM_INVALID, "virtual memory", "%p is not mapped", address));
    memset(b->mapped + p->offset / GRANULE, 0, p->size / GRANULE);
    kvd_journal_block(ENTRY_FREE, b, p->offset, p->size);
    kvd_discard(b, p->offset, p->size);
    p->at = NULL;
    return leave(OK);
}

int aclrtMemGetAllocationGranularity(const void *properties, int option, size_t *granularity) {
    int code = enter("aclrtMemGetAllocationGranularity", RUNTIME, "%d", option);
    if (code) return leave(code);
    if (!properties || !granularity) return leave(violate(RT_PARAM_INVALID, "virtual memory", "NULL"));
    *granularity = GRANULE;
    return leave(OK);
}

// -- other processes --------------------------------------------------------------------------------

static int not_shared(const char *symbol) {
    int code = enter(symbol, CALLABLE, "%s", "");
    return leave(code ? code : error(RT_FEATURE_NOT_SUPPORT,
                                     "each process is an emulated machine of its own: device memory "
                                     "and events cannot be handed to another process"));
}

int aclrtMemExportToShareableHandle(void *handle, int kind, uint64_t flags, uint64_t *shareable) {
    return (void)handle, (void)kind, (void)flags, (void)shareable,
           not_shared("aclrtMemExportToShareableHandle");
}
int aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, void **handle) {
    return (void)shareable, (void)device, (void)handle,
           not_shared("aclrtMemImportFromShareableHandle");
}
int aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *pids, size_t count) {
    return (void)shareable, (void)pids, (void)count, not_shared("aclrtMemSetPidToShareableHandle");
}
int aclrtIpcMemGetExportKey(void *address, size_t size, char *key, size_t length, uint64_t flag) {
    return (void)address, (void)size, (void)key, (void)length, (void)flag,
           not_shared("aclrtIpcMemGetExportKey");
}
int aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) {
    return (void)key, (void)pids, (void)count, not_shared("aclrtIpcMemSetImportPid");
}
int aclrtIpcMemImportByKey(void **address, const char *key, uint64_t flag) {
    return (void)address, (void)key, (void)flag, not_shared("aclrtIpcMemImportByKey");
}
int aclrtIpcMemClose(const char *key) { return (void)key, not_shared("aclrtIpcMemClose"); }
int aclrtIpcGetEventHandle(void *event, void *handle) {
    return (void)event, (void)handle, not_shared("aclrtIpcGetEventHandle");
}
int aclrtIpcOpenEventHandle(void *handle, void **event) {
    return (void)handle, (void)event, not_shared("aclrtIpcOpenEventHandle");
}
