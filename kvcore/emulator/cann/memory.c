// SPDX-License-Identifier: Apache-2.0
// Allocations and registrations (page 1.4, 5.8, 5.9).  A device address is a number inside a range
// that no thread may read or write: host code that follows one dies at once.  Addresses are never
// used twice.  Where the bytes really are only kernels and copies know, but after kvdouble_open:
// then new memory has its bytes where its address says, for tests that look into it.
#include "machine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t RESERVED = (size_t)1 << 37;
static uintptr_t range_start, range_next;
static bool is_open;

static struct block **blocks;  // by start
static size_t num_blocks, room_blocks;
static uint64_t used[16], next_serial;

struct registration {
    uintptr_t start;
    size_t size;
    struct block *swapped, *pinned;  // either may be NULL
};
static struct registration registrations[4096];
static size_t num_registrations;

static size_t position(uintptr_t address) {  // of the first block that starts past it
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle]->start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

enum place kvd_find(const void *address, struct block **block) {
    uintptr_t at = (uintptr_t)address;
    size_t i = position(at);
    struct block *b = i ? blocks[i - 1] : NULL;
    if (b && at - b->start < b->size) {
        *block = b;
        return b->place;
    }
    *block = NULL;
    return range_start && at - range_start < RESERVED ? STRAY : PAGEABLE;
}

static struct block *add(enum place place, uintptr_t start, size_t size, void *bytes, void *owned) {
    struct block *b = calloc(1, sizeof *b);
    if (!b) abort();
    *b = (struct block){.place = place, .start = start, .size = size, .bytes = bytes,
                        .owned = owned, .serial = ++next_serial, .refs = 1};
    if (num_blocks == room_blocks) {
        room_blocks = 2 * room_blocks + 64;
        blocks = realloc(blocks, room_blocks * sizeof *blocks);
        if (!blocks) abort();
    }
    size_t i = position(start);
    memmove(blocks + i + 1, blocks + i, (num_blocks - i) * sizeof *blocks);
    blocks[i] = b;
    num_blocks++;
    return b;
}

void kvd_drop_block(struct block *b) {
    if (--b->refs) return;
    free(b->owned);
    free(b);
}

// The block is gone for callers; a launched task that needs it finds it dead.
static void forget(struct block *b) {
    size_t i = position(b->start) - 1;
    memmove(blocks + i, blocks + i + 1, (num_blocks - i - 1) * sizeof *blocks);
    num_blocks--;
    if (b->place == DEVICE) used[b->device] -= b->size;
    b->dead = true;
    kvd_drop_block(b);
}

size_t kvd_live_blocks(enum place place) {
    if (place == SWAPPED) return num_registrations;
    size_t n = 0;
    for (size_t i = 0; i < num_blocks; i++) n += blocks[i]->place == place && blocks[i]->owned;
    return n;
}

void kvd_reset_memory(void) {
    while (num_blocks) forget(blocks[num_blocks - 1]);
    num_registrations = 0;
    memset(used, 0, sizeof used);
    if (is_open) {
        is_open = false;
        if (mprotect((void *)range_start, RESERVED, PROT_NONE)) abort();
        madvise((void *)range_start, RESERVED, MADV_DONTNEED);
    }
}

// Memory of which only one byte is owned: that it is there is all that its end needs to know.
static void *uncover(uintptr_t at, size_t size) {
    uintptr_t start = at & ~(uintptr_t)4095, end = (at + size + 4095) & ~(uintptr_t)4095;
    return mprotect((void *)start, end - start, PROT_READ | PROT_WRITE) ? NULL : malloc(1);
}

static uintptr_t reserve(size_t size, size_t alignment) {
    if (!range_start) {
        void *p = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) abort();
        range_start = (uintptr_t)p;
        range_next = range_start + 4096;
    }
    uintptr_t at = (range_next + alignment - 1) & ~(uintptr_t)(alignment - 1);
    if (size > RESERVED / 2 || at + size + 4096 > range_start + RESERVED) return 0;
    range_next = at + size + 64;  // never side by side: a step past the end is seen
    return at;
}

// -- device memory ----------------------------------------------------------------------------------------

static int allocate(void **p, size_t size, int policy, bool padded) {
    if (!p) return violate(INVALID_PARAM, "1.4", "p is NULL");
    *p = NULL;
    if (!size) return violate(INVALID_PARAM, "1.4", "size is 0");
    int base = policy & ~(0x100 | 0x1000 | 0x100000);  // 2: what may be OR-ed
    if (base < 0 || base > 7) return violate(RT_PARAM_INVALID, "2", "policy %#x", policy);
    enum soc soc = kvd_settings.soc;
    int device = kvd_context()->device;
    uint64_t counted = size;
    // 5.8: 32-aligned, and 32 bytes more but on 950; 64-byte aligned
    if (size < (size_t)-64) counted = (size + 31) / 32 * 32 + (padded && soc != SOC_950 ? 32 : 0);
    if (counted > kvd_settings.capacity || used[device] > kvd_settings.capacity - counted)
        return error(RT_MEMORY_ALLOCATION, "%zu bytes wanted, %llu of %llu free", size,
                     (unsigned long long)(kvd_settings.capacity - used[device]),
                     (unsigned long long)kvd_settings.capacity);
    uintptr_t at = reserve(size, 64);
    void *bytes = NULL, *owned = NULL;
    if (at && is_open) owned = uncover(at, size), bytes = (void *)at;
    else if (at && !posix_memalign(&bytes, 64, size)) owned = bytes;
    if (!owned) return error(RT_MEMORY_ALLOCATION, "%zu bytes wanted", size);
    memset(bytes, 0xA5, size < 4096 ? size : 4096);  // nobody promises zeros
    struct block *b = add(DEVICE, at, size, bytes, owned);
    b->device = device;
    used[device] += size;
    *p = (void *)at;
    return OK;
}

int aclrtMalloc(void **p, size_t size, int policy) {
    int code = enter("aclrtMalloc", RUNTIME, "%zu, %#x", size, policy);
    return leave(code ? code : allocate(p, size, policy, true));
}

int aclrtMallocAlign32(void **p, size_t size, int policy) {
    int code = enter("aclrtMallocAlign32", RUNTIME, "%zu, %#x", size, policy);
    return leave(code ? code : allocate(p, size, policy, false));
}

int aclrtMallocCached(void **p, size_t size, int policy) {
    int code = enter("aclrtMallocCached", RUNTIME, "%zu, %#x", size, policy);
    return leave(code ? code : allocate(p, size, policy, true));
}

// 1.4: twelve bytes an attribute, its value at offset 4.  A caller that lays out 16 bytes with the
// value at offset 8 shows as a zero value with something behind it.
static int check_config(const malloc_config *config, bool *page_aligned) {
    if (!config) return violate(RT_PARAM_INVALID, "1.4", "cfg is NULL");
    if (config->count && !config->attrs) return violate(RT_PARAM_INVALID, "1.4", "attrs is NULL");
    if (config->count > 8) return violate(RT_PARAM_INVALID, "1.4", "numAttrs %zu", config->count);
    for (size_t i = 0; i < config->count; i++) {
        const malloc_attribute *a = &config->attrs[i];
        uint32_t behind;
        memcpy(&behind, a->value.bytes + 4, 4);
        if (a->attr < ATTR_MODULE_ID || a->attr > ATTR_VA_FLAG)
            return violate(RT_PARAM_INVALID, "1.4", "attrs[%zu].attr is %d: 12-byte layout?", i,
                           a->attr);
        if (!a->value.va_flag && behind)
            return violate(RT_PARAM_INVALID, "1.4",
                           "attrs[%zu]: value 0 at offset 4 and %#x at offset 8: 12-byte layout?",
                           i, behind);
        if (a->attr == ATTR_VA_FLAG && a->value.va_flag > 1)
            return violate(RT_PARAM_INVALID, "1.4", "attrs[%zu]: VA_FLAG %#x: 12-byte layout?", i,
                           a->value.va_flag);
        if (a->attr == ATTR_DEVICE_ID && a->value.device_id >= (uint32_t)kvd_settings.devices)
            return violate(RT_PARAM_INVALID, "1.4", "attrs[%zu]: device %u", i, a->value.device_id);
        *page_aligned |= a->attr == ATTR_VA_FLAG && a->value.va_flag == 1;
    }
    return OK;
}

int aclrtMallocWithCfg(void **p, size_t size, int policy, malloc_config *config) {
    int code = enter("aclrtMallocWithCfg", RUNTIME, "%zu, %#x", size, policy);
    bool page_aligned = false;
    if (!code) code = check_config(config, &page_aligned);
    return leave(code ? code : allocate(p, size, policy, true));
}

static int release(void *p, enum place place) {
    if (!p) return violate(INVALID_PARAM, "1.4", "NULL");
    struct block *b;
    enum place seen = kvd_find(p, &b);
    if (!b || seen != place || b->start != (uintptr_t)p || !b->owned)
        return violate(RT_PARAM_INVALID, "1.4", "%p is %s", p,
                       !b ? (seen == STRAY ? "a device address that is not allocated (any more)"
                                           : "not of this interface (any more)")
                       : seen != place ? "memory of another kind" : "not the start of its memory");
    for (size_t i = 0; i < num_registrations; i++)
        if (registrations[i].start - b->start < b->size)
            return violate(RT_PARAM_INVALID, "5.9", "%p is still registered", p);
    if (b->pending)
        violate(OK, "5.1", "%p (%zu bytes) is freed before its stream passed: %d tasks use it", p,
                b->size, b->pending);
    forget(b);
    return OK;
}

int aclrtFree(void *p) {
    int code = enter("aclrtFree", RUNTIME | AFTER, "%p", p);
    return leave(code ? code : release(p, DEVICE));  // 5.8: does not wait
}

int aclrtFreeWithDevSync(void *p) {
    int code = enter("aclrtFreeWithDevSync", RUNTIME | AFTER, "%p", p);
    if (code) return leave(code);
    kvd_sync_all(kvd_context()->device);
    return leave(release(p, DEVICE));
}

// -- host memory ------------------------------------------------------------------------------------------

static int allocate_host(void **p, size_t size, bool page_aligned) {
    if (!p) return violate(INVALID_PARAM, "1.4", "p is NULL");
    *p = NULL;
    if (!size) return violate(INVALID_PARAM, "1.4", "size is 0");
    void *bytes = NULL;
    if (size > RESERVED || posix_memalign(&bytes, page_aligned ? 4096 : 64, size))
        return error(RT_MEMORY_ALLOCATION, "%zu bytes of host memory", size);
    add(PINNED, (uintptr_t)bytes, size, bytes, bytes);
    *p = bytes;
    return OK;
}

int aclrtMallocHost(void **p, size_t size) {
    int code = enter("aclrtMallocHost", RUNTIME, "%zu", size);
    return leave(code ? code : allocate_host(p, size, false));
}

int aclrtMallocHostWithCfg(void **p, uint64_t size, malloc_config *config) {
    int code = enter("aclrtMallocHostWithCfg", RUNTIME, "%llu", (unsigned long long)size);
    bool page_aligned = false;
    if (!code) code = check_config(config, &page_aligned);
    return leave(code ? code : allocate_host(p, size, page_aligned));
}

int aclrtFreeHost(void *p) {
    int code = enter("aclrtFreeHost", RUNTIME | AFTER, "%p", p);
    return leave(code ? code : release(p, PINNED));
}

int aclrtFreeHostWithDevSync(void *p) {
    int code = enter("aclrtFreeHostWithDevSync", RUNTIME | AFTER, "%p", p);
    if (code) return leave(code);
    kvd_sync_all(kvd_context()->device);
    return leave(release(p, PINNED));
}

// -- what there is ------------------------------------------------------------------------------------------

int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
    int code = enter("aclrtGetMemInfo", RUNTIME, "%d", attribute);
    if (code) return leave(code);
    if (!free_bytes || !total) return leave(violate(INVALID_PARAM, "1.4", "NULL"));
    if (attribute != 1 && attribute != 4 && attribute != 5)  // 1.4: use ACL_HBM_MEM
        return leave(violate(RT_PARAM_INVALID, "1.4", "attribute %d is not HBM", attribute));
    *total = kvd_settings.capacity;
    *free_bytes = *total - used[kvd_context()->device];
    return leave(OK);
}

int aclrtPointerGetAttributes(const void *p, pointer_attributes *a) {
    int code = enter("aclrtPointerGetAttributes", RUNTIME, "%p", p);
    if (code) return leave(code);
    if (!p || !a) return leave(violate(INVALID_PARAM, "1.4", "NULL"));
    struct block *b;
    enum place place = kvd_find(p, &b);
    memset(a, 0, sizeof *a);
    a->location.type = place == PINNED ? LOCATION_HOST
                     : place == DEVICE || place == SWAPPED ? LOCATION_DEVICE : LOCATION_UNREGISTERED;
    a->location.id = b ? (uint32_t)b->device : 0;
    a->page_size = 4096;
    return leave(OK);
}

// -- registration (5.9) ---------------------------------------------------------------------------------------

static int add_registration(void *p, uint64_t size, bool mapped, bool pinned, void **device) {
    if (!p || !size) return violate(RT_PARAM_INVALID, "5.9", "%p, %zu bytes", p, (size_t)size);
    if ((uintptr_t)p % 4096)
        return violate(RT_ADDR_UNALIGNED, "5.9", "%p is not 4 KB-aligned", p);
    if (size % 4096)
        return violate(RT_PARAM_INVALID, "5.9", "%zu bytes are no whole pages", (size_t)size);
    if (kvd_settings.soc == SOC_310P) return error(RT_FEATURE_NOT_SUPPORT, "not on 310P");
    uintptr_t start = (uintptr_t)p;
    for (size_t i = 0; i < num_registrations; i++) {
        struct registration *r = &registrations[i];
        if (start < r->start + r->size && r->start < start + size)
            return violate(RT_HOST_ALREADY_REGISTERED, "5.9", "%p is registered already", p);
    }
    struct block *inside;
    enum place place = kvd_find(p, &inside);
    if (place != PAGEABLE && place != PINNED)
        return violate(RT_PARAM_INVALID, "5.9", "%p is not host memory", p);
    if (inside && start + size > inside->start + inside->size)
        return violate(RT_PARAM_INVALID, "5.9", "%zu bytes at %p leave their memory", (size_t)size, p);
    uintptr_t at = mapped ? reserve(size, 4096) : 0;
    if (num_registrations == 4096 || (mapped && !at))
        return error(RT_MEMORY_ALLOCATION, "no more registrations");
    struct registration *r = &registrations[num_registrations++];
    *r = (struct registration){start, size, NULL, NULL};
    if (mapped) {
        r->swapped = add(SWAPPED, at, size, p, NULL);
        r->swapped->device = kvd_context()->device;
    }
    if (pinned && !inside) r->pinned = add(PINNED, start, size, p, NULL);
    if (device) *device = (void *)at;
    return OK;
}

int aclrtHostRegister(void *p, uint64_t size, int type, void **device) {
    int code = enter("aclrtHostRegister", RUNTIME, "%p, %zu, %d", p, (size_t)size, type);
    if (code) return leave(code);
    if (!device) return leave(violate(RT_PARAM_INVALID, "1.4", "devPtr is NULL"));
    if (type != 0) return leave(violate(RT_FEATURE_NOT_SUPPORT, "2", "type %d is reserved", type));
    return leave(add_registration(p, size, true, true, device));
}

int aclrtHostRegisterV2(void *p, uint64_t size, uint32_t flag) {
    int code = enter("aclrtHostRegisterV2", RUNTIME, "%p, %zu, %#x", p, (size_t)size, flag);
    if (code) return leave(code);
    if (!flag || flag & ~(uint32_t)(HOST_MAPPED | HOST_IOMEMORY | HOST_READONLY | HOST_PINNED))
        return leave(violate(RT_PARAM_INVALID, "2", "flag %#x", flag));
    return leave(add_registration(p, size, flag & HOST_MAPPED, flag & HOST_PINNED, NULL));
}

int aclrtHostGetDevicePointer(void *host, void **device, uint32_t flag) {
    int code = enter("aclrtHostGetDevicePointer", RUNTIME, "%p, %u", host, flag);
    if (code) return leave(code);
    if (!device || flag) return leave(violate(RT_PARAM_INVALID, "1.4", "devPtr NULL, or flag not 0"));
    for (size_t i = 0; i < num_registrations; i++) {
        struct registration *r = &registrations[i];
        uintptr_t offset = (uintptr_t)host - r->start;
        if (offset >= r->size || !r->swapped) continue;
        *device = (void *)(r->swapped->start + offset);
        return leave(OK);
    }
    return leave(violate(RT_HOST_NOT_REGISTERED, "5.9", "%p is not registered and mapped", host));
}

int aclrtHostUnregister(void *p) {
    int code = enter("aclrtHostUnregister", RUNTIME | AFTER, "%p", p);
    if (code) return leave(code);
    for (size_t i = 0; i < num_registrations; i++) {
        struct registration r = registrations[i];
        if (r.start != (uintptr_t)p) continue;
        struct block *both[2] = {r.swapped, r.pinned};
        registrations[i] = registrations[--num_registrations];
        for (int k = 0; k < 2; k++) {
            if (!both[k]) continue;
            if (both[k]->pending)
                violate(OK, "5.9", "%p is unregistered before its stream passed", p);
            forget(both[k]);
        }
        return leave(OK);
    }
    return leave(violate(RT_HOST_NOT_REGISTERED, "5.9", "%p is not registered (any more)", p));
}

int aclrtHostMemMapCapabilities(uint32_t device, int unit, int *capability) {
    int code = enter("aclrtHostMemMapCapabilities", RUNTIME, "%u, %d", device, unit);
    if (code) return leave(code);
    if (!capability || unit < 0 || unit > 6 || device >= (uint32_t)kvd_settings.devices)
        return leave(violate(RT_PARAM_INVALID, "1.4", "device %u, unit %d", device, unit));
    *capability = kvd_settings.soc != SOC_310P;
    return leave(OK);
}

// -- control: device memory as a test sees it ---------------------------------------------------------------

static int move(void *device, void *host, size_t size, bool write) {
    pthread_mutex_lock(&kvd_lock);
    struct block *b;
    kvd_find(device, &b);
    bool ok = b && size <= b->size - ((uintptr_t)device - b->start);
    if (ok) {
        unsigned char *at = b->bytes + ((uintptr_t)device - b->start);
        memcpy(write ? at : host, write ? host : at, size);
    }
    pthread_mutex_unlock(&kvd_lock);
    return ok ? 0 : -1;
}

int kvdouble_peek(void *device, void *host, size_t size) { return move(device, host, size, false); }
int kvdouble_poke(void *device, void *host, size_t size) { return move(device, host, size, true); }

void kvdouble_open(void) {
    pthread_mutex_lock(&kvd_lock);
    if (!range_start) reserve(1, 64);
    is_open = true;
    pthread_mutex_unlock(&kvd_lock);
}
