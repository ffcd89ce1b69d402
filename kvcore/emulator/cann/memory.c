// SPDX-License-Identifier: Apache-2.0
// Allocations and registrations (section 1.4, 5.8, 5.9).  A device address is a number inside a range
// that no thread may read or write: host code that follows one dies at once.  Addresses are never
// used twice.  The bytes lie in a second range of the same size, the alias, at a constant distance
// from the first: kernels, copies and other tasks reach them there, and tensors that torch makes
// over them need one addition (kvd_alias).  After kvdouble_open new memory has its bytes where its
// address says, for tests that look into it.
#include "machine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t range_size;
static uintptr_t range_start, range_next;
static uintptr_t swapped_start, swapped_next;  // the upper half: views of registered host memory
static intptr_t to_alias;
static bool is_open;

static struct block **blocks;  // by start
static size_t num_blocks, room_blocks;
static uint64_t used[16], used_pinned, next_serial;

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
    return range_start && at - range_start < range_size ? STRAY : PAGEABLE;
}

bool kvd_is_device_address(const void *at) {  // also from a handler of signals
    return range_start && (uintptr_t)at - range_start < range_size;
}

static struct block *add(enum place place, uintptr_t start, size_t size, void *bytes, bool owned) {
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

// Pages of the alias: their owner starts and ends on a page of its own.
static void give_back(unsigned char *bytes, size_t size) {
    madvise(bytes, (size + 4095) / 4096 * 4096, MADV_DONTNEED);
}

void kvd_drop_block(struct block *b) {
    if (--b->refs) return;
    if (b->owned && b->place == PINNED) free(b->bytes);
    if (b->owned && b->place == DEVICE) give_back(b->bytes, b->size);
    free(b->mapped);
    free(b);
}

// The block is gone for callers; a launched task that needs it finds it dead.
static void forget(struct block *b) {
    size_t i = position(b->start) - 1;
    memmove(blocks + i, blocks + i + 1, (num_blocks - i - 1) * sizeof *blocks);
    num_blocks--;
    if (b->place == DEVICE && !b->mapped) used[b->device] -= b->size;
    if (b->place == PINNED && b->owned) used_pinned -= b->size;
    b->dead = true;
    kvd_drop_block(b);
}

size_t kvd_live_blocks(enum place place) {
    if (place == SWAPPED) return num_registrations;
    size_t n = 0;
    for (size_t i = 0; i < num_blocks; i++)
        n += blocks[i]->place == place && blocks[i]->owned && !blocks[i]->mapped;
    return n;
}

void kvd_reset_memory(void) {
    while (num_blocks) forget(blocks[num_blocks - 1]);
    num_registrations = 0;
    memset(used, 0, sizeof used);
    used_pinned = 0;
    if (is_open) {
        is_open = false;
        if (mprotect((void *)range_start, range_size, PROT_NONE)) abort();
        madvise((void *)range_start, range_size, MADV_DONTNEED);
    }
}

// Memory that is opened for the host: both ranges would need the same pages, so its bytes are where
// its address says.
static void *uncover(uintptr_t at, size_t size) {
    uintptr_t start = at & ~(uintptr_t)4095, end = (at + size + 4095) & ~(uintptr_t)4095;
    bool failed = mprotect((void *)start, end - start, PROT_READ | PROT_WRITE);
    return failed ? NULL : (void *)at;
}

static void *map(size_t size, int protection) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(NULL, size, protection, flags, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

// Two ranges of addresses, as large as the system lets us have: no page of them exists before it is
// touched.  A forked child gets neither the bytes nor the right to touch them.
static bool open_ranges(void) {
    for (size_t size = (size_t)1 << 42; size >= (size_t)1 << 33; size /= 2) {
        void *numbers = map(size, PROT_NONE);
        void *alias = numbers ? map(size, PROT_READ | PROT_WRITE) : NULL;
        if (alias) {
            madvise(alias, size, MADV_DONTFORK);
            madvise(alias, size, MADV_DONTDUMP);
            madvise(numbers, size, MADV_DONTDUMP);
            range_size = size;
            range_start = (uintptr_t)numbers;
            range_next = range_start + 4096;
            swapped_start = swapped_next = range_start + size / 2;
            to_alias = (char *)alias - (char *)numbers;
            return true;
        }
        if (numbers) munmap(numbers, size);
    }
    return false;
}

void kvd_remap_memory(void) {
    if (!range_start) return;
    void *alias = (void *)(range_start + (uintptr_t)to_alias);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(alias, range_size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) abort();
    madvise(alias, range_size, MADV_DONTFORK);
    madvise(alias, range_size, MADV_DONTDUMP);
}

static uintptr_t take(uintptr_t *next, uintptr_t end, size_t size, size_t alignment) {
    uintptr_t at = (*next + alignment - 1) & ~(uintptr_t)(alignment - 1);
    if (size > range_size / 2 || at + size + 8192 > end) return 0;
    *next = ((at + size + 4095) & ~(uintptr_t)4095) + 4096;  // a step past the end is seen
    return at;
}

uintptr_t kvd_reserve(size_t size, size_t alignment) {
    if (!range_start && !open_ranges()) return 0;
    return take(&range_next, swapped_start, size, alignment);
}

static uintptr_t reserve_swapped(size_t size) {
    if (!range_start && !open_ranges()) return 0;
    return take(&swapped_next, range_start + range_size, size, 4096);
}

unsigned char *kvd_alias(uintptr_t at) { return (unsigned char *)(at + (uintptr_t)to_alias); }

// For tasks that run as code of the host: device addresses, their number, the way to the bytes.
int kvdouble_ranges(uintptr_t *start, size_t *size, intptr_t *alias, uintptr_t *swapped) {
    pthread_mutex_lock(&kvd_lock);
    bool ok = range_start || open_ranges();
    *start = range_start, *size = range_size, *alias = to_alias, *swapped = swapped_start;
    pthread_mutex_unlock(&kvd_lock);
    return ok ? 0 : -1;
}

// The host's address of the device's view of registered memory; NULL: it is none.
void *kvdouble_host_address(const void *address) {
    pthread_mutex_lock(&kvd_lock);
    struct block *b;
    void *at = kvd_find(address, &b) == SWAPPED ? b->bytes + ((uintptr_t)address - b->start) : NULL;
    pthread_mutex_unlock(&kvd_lock);
    return at;
}

// Where the bytes of a range of addresses are; NULL unless one allocation has all of them.
void *kvdouble_bytes(const void *address, size_t size) {
    pthread_mutex_lock(&kvd_lock);
    struct block *b = NULL;
    kvd_find(address, &b);
    size_t offset = b ? (uintptr_t)address - b->start : 0;
    void *at = b && !b->dead && kvd_fits(b, offset, size) ? b->bytes + offset : NULL;
    pthread_mutex_unlock(&kvd_lock);
    return at;
}

bool kvd_fits(const struct block *b, size_t offset, size_t size) {
    if (offset > b->size || size > b->size - offset) return false;
    for (size_t at = offset / GRANULE; b->mapped && size && at <= (offset + size - 1) / GRANULE; at++)
        if (!b->mapped[at]) return false;
    return true;
}

bool kvd_charge(int device, uint64_t size) {
    uint64_t all = used_pinned;
    for (int i = 0; i < 16; i++) all += used[i];
    struct settings *s = &kvd_settings;
    if (size > s->capacity || used[device] > s->capacity - size) return false;
    if (s->budget && (size > s->budget || all > s->budget - size)) return false;
    used[device] += size;
    return true;
}

void kvd_uncharge(int device, uint64_t size) { used[device] -= size; }

// Addresses without memory, for virtual.c.
struct block *kvd_add_reserved(uintptr_t start, size_t size, int device) {
    struct block *b = add(DEVICE, start, size, kvd_alias(start), true);
    b->device = device;
    b->mapped = calloc(size / GRANULE + 1, 1);
    if (!b->mapped) abort();
    return b;
}

void kvd_forget_reserved(struct block *b) { forget(b); }

void kvd_discard(struct block *b, size_t offset, size_t size) { give_back(b->bytes + offset, size); }

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
    if (!kvd_charge(device, counted))
        return error(RT_MEMORY_ALLOCATION, "%zu bytes wanted, %llu of %llu free", size,
                     (unsigned long long)(kvd_settings.capacity - used[device]),
                     (unsigned long long)kvd_settings.capacity);
    kvd_uncharge(device, counted - size);  // the padding is asked for, and not kept
    uintptr_t at = kvd_reserve(size, 4096);
    void *bytes = !at ? NULL : is_open ? uncover(at, size) : kvd_alias(at);
    if (!bytes) {
        kvd_uncharge(device, size);
        return error(RT_MEMORY_ALLOCATION, "%zu bytes wanted, no more addresses", size);
    }
    memset(bytes, 0xA5, size < 4096 ? size : 4096);  // new memory is not promised to be zero
    struct block *b = add(DEVICE, at, size, bytes, true);
    b->device = device;
    kvd_journal_block(ENTRY_NEW, b, 0, size);
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
    if (!b || seen != place || b->start != (uintptr_t)p || !b->owned || b->mapped)
        return violate(RT_PARAM_INVALID, "1.4", "%p is %s", p,
                       !b ? (seen == STRAY ? "a device address that is not allocated (any more)"
                                           : "not of this interface (any more)")
                       : seen != place ? "memory of another kind" : "not the start of its memory");
    for (size_t i = 0; i < num_registrations; i++)
        if (registrations[i].start - b->start < b->size)
            return violate(RT_PARAM_INVALID, "5.9", "%p is still registered", p);
    if (b->pending && !kvd_journal_on())
        violate(OK, "5.1", "%p (%zu bytes) is freed before its stream passed: %d tasks use it", p,
                b->size, b->pending);
    kvd_journal_block(ENTRY_FREE, b, 0, b->size);
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

// Whole pages: torch_npu registers what it gets here from the first page boundary on.
static int allocate_host(void **p, size_t size) {
    if (!p) return violate(INVALID_PARAM, "1.4", "p is NULL");
    *p = NULL;
    if (!size) return violate(INVALID_PARAM, "1.4", "size is 0");
    void *bytes = NULL;
    uint64_t all = used_pinned, budget = kvd_settings.budget;
    for (int i = 0; i < 16; i++) all += used[i];
    if (budget && (size > budget || all > budget - size))
        return error(RT_MEMORY_ALLOCATION, "%zu bytes of host memory, %llu of %llu are in use", size,
                     (unsigned long long)all, (unsigned long long)budget);
    if (size > PTRDIFF_MAX || posix_memalign(&bytes, 4096, size))
        return error(RT_MEMORY_ALLOCATION, "%zu bytes of host memory", size);
    kvd_journal_block(ENTRY_NEW, add(PINNED, (uintptr_t)bytes, size, bytes, true), 0, size);
    used_pinned += size;
    *p = bytes;
    return OK;
}

int aclrtMallocHost(void **p, size_t size) {
    int code = enter("aclrtMallocHost", RUNTIME, "%zu", size);
    return leave(code ? code : allocate_host(p, size));
}

int aclrtMallocHostWithCfg(void **p, uint64_t size, malloc_config *config) {
    int code = enter("aclrtMallocHostWithCfg", RUNTIME, "%llu", (unsigned long long)size);
    bool page_aligned = false;
    if (!code) code = check_config(config, &page_aligned);
    return leave(code ? code : allocate_host(p, size));
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
    uintptr_t at = mapped ? reserve_swapped(size) : 0;
    if (num_registrations == 4096 || (mapped && !at))
        return error(RT_MEMORY_ALLOCATION, "no more registrations");
    struct registration *r = &registrations[num_registrations++];
    *r = (struct registration){start, size, NULL, NULL};
    if (mapped) {
        r->swapped = add(SWAPPED, at, size, p, false);
        r->swapped->device = kvd_context()->device;
    }
    if (pinned && !inside) {
        r->pinned = add(PINNED, start, size, p, false);
        kvd_journal_block(ENTRY_NEW, r->pinned, 0, size);
    }
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
            if (both[k]->pending && !kvd_journal_on())
                violate(OK, "5.9", "%p is unregistered before its stream passed", p);
            kvd_journal_block(ENTRY_FREE, both[k], 0, both[k]->size);
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
    bool ok = b && kvd_fits(b, (uintptr_t)device - b->start, size);
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
    is_open = range_start || open_ranges();
    pthread_mutex_unlock(&kvd_lock);
}
