// SPDX-License-Identifier: Apache-2.0
// Init, devices, contexts, what a device is (section 1.2, 1.3, 3).
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEVICES = 16 };

struct settings kvd_settings = {.devices = -1};
static uint64_t init_refs;
static bool foreign_finalize;
static struct context *primary[MAX_DEVICES];
static int device_refs[MAX_DEVICES];

static _Thread_local struct context *current;
static _Thread_local uint64_t current_serial;
static _Thread_local enum callback_kind callback;

bool kvd_initialized(void) { return init_refs > 0; }
bool kvd_torn_down(void) { return foreign_finalize; }
enum callback_kind kvd_in_callback(void) { return callback; }
void kvd_set_in_callback(enum callback_kind kind) { callback = kind; }

struct context *kvd_context(void) {
    return current && kvd_is_live(current, H_CONTEXT, current_serial) ? current : NULL;
}

static void use(struct context *c) {
    current = c;
    current_serial = c ? c->handle.serial : 0;
}

// 3: names and their traps; a bare Ascend910B is the old 910.
void kvd_set_soc(const char *name) {
    struct settings *s = &kvd_settings;
    snprintf(s->soc_name, sizeof s->soc_name, "%s", name);
    s->soc = SOC_OTHER;
    if (!strncmp(name, "Ascend910B", 10) && name[10] >= '0' && name[10] <= '9') s->soc = SOC_A2;
    if (!strncmp(name, "Ascend910_93", 12)) s->soc = SOC_A3;
    if (!strncmp(name, "Ascend950", 9) || !strncmp(name, "Ascend910_95", 12)) s->soc = SOC_950;
    if (!strncmp(name, "Ascend310P", 10)) s->soc = SOC_310P;
}

__attribute__((constructor)) static void defaults(void) {
    struct settings *s = &kvd_settings;
    memset(s, 0, sizeof *s);
    s->devices = kvd_built_devices;
    s->capacity = 4ull << 30;
    s->workspace_extra = 512;
    s->give_up_ns = 10000000000u;
    kvd_set_soc(kvd_built_soc);
    // In a child process torch_npu may call this before the machine has been set up.
    const char *asked = getenv("KVCORE_EMULATE"), *count = getenv("KVCORE_EMULATE_DEVICES");
    if (!asked || !*asked) return;
    if (!strcmp(asked, "A2")) kvd_set_soc("Ascend910B3");
    if (!strcmp(asked, "A3")) kvd_set_soc("Ascend910_9391");
    if (!strcmp(asked, "950")) kvd_set_soc("Ascend950PR_9599");
    if (count && atoi(count) > 0 && atoi(count) <= MAX_DEVICES) s->devices = atoi(count);
}

struct search {
    struct context *context;
    struct stream *stream;
};

static void pick_stream(void *stream, void *data) {
    struct search *search = data;
    if (((struct stream *)stream)->context == search->context) search->stream = stream;
}

static void close_context(struct context *c) {
    for (;;) {  // one at a time: closing lets the lock go
        struct search search = {c, NULL};
        kvd_each(H_STREAM, pick_stream, &search);
        if (!search.stream) break;
        kvd_close_stream(search.stream, true);
    }
    kvd_destroy(c);
}

static void pick_context(void *context, void *data) { *(struct context **)data = context; }

static void close_all(void) {
    for (;;) {
        struct context *c = NULL;
        kvd_each(H_CONTEXT, pick_context, &c);
        if (!c) break;
        close_context(c);
    }
    memset(primary, 0, sizeof primary);
    memset(device_refs, 0, sizeof device_refs);
}

void kvd_reset_devices(void) {
    close_all();
    kvd_forget_events();
    init_refs = 0;
    foreign_finalize = false;
    defaults();
}

// -- init (1.2) ---------------------------------------------------------------------------------------

int aclInit(const char *config) {
    kvd_complete_machine();
    int code = enter("aclInit", 0, "%s", config ? config : "NULL");
    if (code) return leave(code);
    foreign_finalize = false;
    // 2: 100002 is no failure, and the count still goes up
    return leave(init_refs++ ? error(REPEAT_INITIALIZE, "initialized already") : OK);
}

int aclFinalize(void) {
    int code = enter("aclFinalize", AFTER, "%s", "");
    if (code) return leave(code);
    if (!init_refs) return leave(error(REPEAT_FINALIZE, "finalized already"));
    close_all();  // 1.2: for everyone in the process
    init_refs = 0;
    return leave(OK);
}

int aclFinalizeReference(uint64_t *count) {
    int code = enter("aclFinalizeReference", AFTER, "%p", (void *)count);
    if (code) return leave(code);
    if (!init_refs)
        return leave(foreign_finalize ? error(REPEAT_FINALIZE, "finalized already")
                                      : violate(REPEAT_FINALIZE, "1.2", "pairs with aclInit"));
    if (!--init_refs) close_all();
    if (count) *count = init_refs;
    return leave(OK);
}

int aclsysGetVersionStr(char *package, char *version) {
    int code = enter("aclsysGetVersionStr", CALLABLE, "%s", package ? package : "NULL");
    if (code) return leave(code);
    if (!package || !version) return leave(violate(INVALID_PARAM, "1.2", "NULL"));
    strcpy(version, strcmp(package, "CANN") ? "1.17.0" : KVD_CANN_VERSION);
    return leave(OK);
}

int aclsysGetVersionNum(char *package, int32_t *version) {
    int code = enter("aclsysGetVersionNum", CALLABLE, "%s", package ? package : "NULL");
    if (code) return leave(code);
    if (!package || !version) return leave(violate(INVALID_PARAM, "1.2", "NULL"));
    *version = 11700;
    return leave(OK);
}

int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    int code = enter("aclrtGetVersion", CALLABLE, "%s", "");
    if (code) return leave(code);
    if (!major || !minor || !patch) return leave(violate(INVALID_PARAM, "1.2", "NULL"));
    *major = 1, *minor = 17, *patch = 0;
    return leave(OK);
}

// -- devices (1.3) --------------------------------------------------------------------------------------

bool kvd_is_open(int device) {
    return device >= 0 && device < MAX_DEVICES && primary[device] != NULL;
}

bool kvd_any_open(void) {
    for (int i = 0; i < MAX_DEVICES; i++)
        if (primary[i]) return true;
    return false;
}

static int check_device(int32_t device) {
    if (kvd_settings.devices == 0) return error(RT_NO_DEVICE, "no device");
    if (device < 0 || device >= kvd_settings.devices)
        return error(RT_INVALID_DEVICEID, "device %d of %d", device, kvd_settings.devices);
    return OK;
}

int aclrtSetDevice(int32_t device) {
    int code = enter("aclrtSetDevice", INIT, "%d", device);
    if (!code) code = check_device(device);
    if (code) return leave(code);
    if (!primary[device]) {
        primary[device] = kvd_create(H_CONTEXT, sizeof(struct context));
        primary[device]->device = device;
        primary[device]->primary = true;
    }
    device_refs[device]++;
    use(primary[device]);
    return leave(OK);
}

static int reset(const char *symbol, int32_t device, bool force) {
    int code = enter(symbol, INIT | AFTER, "%d", device);
    if (!code) code = check_device(device);
    if (code) return leave(code);
    if (!primary[device]) return leave(violate(RT_CONTEXT_NULL, "1.3", "device was not set"));
    device_refs[device]--;
    if (force || device_refs[device] == 0) {
        struct context *c = primary[device];
        primary[device] = NULL;
        device_refs[device] = 0;
        close_context(c);
    }
    return leave(OK);
}

int aclrtResetDevice(int32_t device) { return reset("aclrtResetDevice", device, false); }
int aclrtResetDeviceForce(int32_t device) { return reset("aclrtResetDeviceForce", device, true); }

// That the thread has no device is an ordinary answer here, before aclInit too: torch_npu asks in every
// thread, and before anything else where the program begins with swapped memory.
int aclrtGetDevice(int32_t *device) {
    int code = enter("aclrtGetDevice", CALLABLE, "%p", (void *)device);
    if (code) return leave(code);
    if (!device) return leave(violate(INVALID_PARAM, "1.3", "device is NULL"));
    if (!kvd_context()) return leave(error(RT_CONTEXT_NULL, "this thread has no device set"));
    *device = current->device;
    return leave(OK);
}

int aclrtGetDeviceCount(uint32_t *count) {
    int code = enter("aclrtGetDeviceCount", CALLABLE, "%p", (void *)count);
    if (code) return leave(code);
    if (!count) return leave(violate(INVALID_PARAM, "1.3", "count is NULL"));
    *count = (uint32_t)kvd_settings.devices;
    return leave(*count ? OK : error(RT_NO_DEVICE, "no device"));
}

int aclrtGetRunMode(int *mode) {
    int code = enter("aclrtGetRunMode", INIT, "%p", (void *)mode);
    if (code) return leave(code);
    if (!mode) return leave(violate(INVALID_PARAM, "1.3", "mode is NULL"));
    *mode = 1;  // 1.3: ACL_HOST
    return leave(OK);
}

// 3: needs no aclInit.  1.3: NULL on failure.
const char *aclrtGetSocName(void) {
    static char name[64];
    int code = enter("aclrtGetSocName", CALLABLE, "%s", "");
    snprintf(name, sizeof name, "%s", kvd_settings.soc_name);
    bool ok = !code && kvd_settings.devices > 0;
    leave(OK);
    return ok ? name : NULL;
}

int kvd_device_info(uint32_t device, int attribute, int64_t *value) {
    int code = check_device((int32_t)device);
    if (code) return code;
    enum soc soc = kvd_settings.soc;
    switch (attribute) {
    case 1: *value = 7; break;
    case 101: case 102: *value = 24; break;
    case 201: *value = 48; break;
    case 204: *value = 192 << 10; break;
    case 301: *value = (int64_t)kvd_settings.capacity; break;
    case 302: *value = 192 << 20; break;
    case 402: case 403: case 501: *value = 0; break;
    case 601: *value = soc == SOC_950 ? 3510 : soc == SOC_310P ? 2002 : soc == SOC_OTHER ? 1001 : 2201; break;
    default: return error(RT_PARAM_INVALID, "attribute %d", attribute);
    }
    return OK;
}

int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
    int code = enter("aclrtGetDeviceInfo", INIT, "%u, %d", device, attribute);
    if (code) return leave(code);
    if (!value) return leave(violate(INVALID_PARAM, "1.3", "value is NULL"));
    return leave(kvd_device_info(device, attribute, value));
}

int aclrtQueryDeviceStatus(int32_t device, int *status) {
    int code = enter("aclrtQueryDeviceStatus", INIT, "%d", device);
    if (!code) code = check_device(device);
    if (code) return leave(code);
    if (!status) return leave(violate(INVALID_PARAM, "1.3", "status is NULL"));
    *status = 0;
    return leave(OK);
}

// -- contexts (1.3) ---------------------------------------------------------------------------------------

int aclrtCreateContext(void **context, int32_t device) {
    int code = enter("aclrtCreateContext", INIT, "%d", device);
    if (!code) code = check_device(device);
    if (code) return leave(code);
    if (!context) return leave(violate(INVALID_PARAM, "1.3", "context is NULL"));
    struct context *c = kvd_create(H_CONTEXT, sizeof *c);
    c->device = device;
    use(c);
    *context = c;
    return leave(OK);
}

int aclrtDestroyContext(void *context) {
    int code = enter("aclrtDestroyContext", INIT | AFTER, "%p", context);
    if (code) return leave(code);
    struct context *c = kvd_check(context, H_CONTEXT, "context");
    if (!c) return leave(RT_INVALID_HANDLE);
    if (c->primary)
        return leave(violate(RT_PARAM_INVALID, "1.3", "context: aclrtSetDevice made it"));
    close_context(c);
    return leave(OK);
}

int aclrtSetCurrentContext(void *context) {
    int code = enter("aclrtSetCurrentContext", INIT, "%p", context);
    if (code) return leave(code);
    struct context *c = kvd_check(context, H_CONTEXT, "context");
    if (!c) return leave(RT_INVALID_HANDLE);
    use(c);
    return leave(OK);
}

int aclrtGetCurrentContext(void **context) {
    int code = enter("aclrtGetCurrentContext", INIT, "%p", (void *)context);
    if (code) return leave(code);
    if (!context) return leave(violate(INVALID_PARAM, "1.3", "context is NULL"));
    *context = kvd_context();
    return leave(*context ? OK : error(RT_CONTEXT_NULL, "this thread has no device set"));
}

int aclrtCtxGetCurrentDefaultStream(void **stream) {
    int code = enter("aclrtCtxGetCurrentDefaultStream", RUNTIME, "%p", (void *)stream);
    if (code) return leave(code);
    if (!stream) return leave(violate(INVALID_PARAM, "1.3", "stream is NULL"));
    *stream = kvd_stream(NULL, &code);
    return leave(OK);
}

size_t aclDataTypeSize(int dtype) {
    enter("aclDataTypeSize", CALLABLE, "%d", dtype);
    size_t size = (size_t)(kvd_bits(dtype) + 7) / 8;
    leave(OK);
    return size;
}

uint16_t aclFloatToFloat16(float value) {
    uint16_t bits;
    kvd_encode(value, (unsigned char *)&bits, FLOAT16);
    return bits;
}

float aclFloat16ToFloat(uint16_t bits) {
    return kvd_decode((const unsigned char *)&bits, FLOAT16);
}

// -- control ----------------------------------------------------------------------------------------------

#define CONTROL(code) \
    pthread_mutex_lock(&kvd_lock); \
    code; \
    kvd_wake_all(); \
    pthread_mutex_unlock(&kvd_lock)

void kvdouble_soc(const char *name) { CONTROL(kvd_set_soc(name)); }
void kvdouble_devices(int count) { CONTROL(kvd_settings.devices = count); }
void kvdouble_capacity(uint64_t bytes) { CONTROL(kvd_settings.capacity = bytes); }
void kvdouble_budget(uint64_t bytes) { CONTROL(kvd_settings.budget = bytes); }
void kvdouble_eager(bool on) { CONTROL(kvd_settings.eager = on); }
void kvdouble_patience(uint64_t ns) { CONTROL(kvd_settings.patience_ns = ns); }
void kvdouble_quiet(bool on) { CONTROL(kvd_settings.quiet = on); }
void kvdouble_lenient_texts(bool on) { CONTROL(kvd_settings.lenient_texts = on); }
void kvdouble_hold(bool on) { CONTROL(kvd_settings.hold = on); }
void kvdouble_poison(bool on) { CONTROL(kvd_settings.poison = on); }
void kvdouble_workspace(uint64_t bytes) { CONTROL(kvd_settings.workspace_extra = bytes); }

int kvdouble_quirk(const char *name, bool on) {
    bool *quirk = NULL;
    if (!strcmp(name, "negative_slots")) quirk = &kvd_settings.quirk_negative;
    if (!strcmp(name, "no_nct_950")) quirk = &kvd_settings.quirk_no_nct_950;
    if (!strcmp(name, "nz_seq_offset")) quirk = &kvd_settings.quirk_offset_nz;
    if (!strcmp(name, "no_2d_on_device")) quirk = &kvd_settings.quirk_no_2d;
    if (!quirk) return -1;
    CONTROL(*quirk = on);
    return 0;
}

// Another party of the process calls aclFinalize.
void kvdouble_foreign_finalize(void) { CONTROL(close_all(); init_refs = 0; foreign_finalize = true); }

int kvdouble_device_refs(int device) {
    CONTROL(int refs = device_refs[device]);
    return refs;
}
