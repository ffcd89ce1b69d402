// SPDX-License-Identifier: Apache-2.0
// What torch_npu needs apart from memory and streams: options that are kept and given back,
// limits, logs, dumps.  Prototypes as in CANN's public headers (acl/acl_rt.h, acl/acl_mdl.h,
// acl/acl_op_compiler.h); what the machine does not have is refused, with a text that says so.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// -- options ----------------------------------------------------------------------------------------

enum { SYS_OPTIONS = 8, COMPILE_OPTIONS = 32, TEXT = 64 };

static int64_t sys_options[SYS_OPTIONS];  // acl's aclSysParamOpt: deterministic algorithms first
// As a real A2 or A3 has them: operators are not compiled when they are called.
static char compile_options[COMPILE_OPTIONS][TEXT] = {[10] = "disable"};

static int get_option(const char *symbol, int option, int64_t *value) {
    int code = enter(symbol, CALLABLE, "%d", option);
    if (code) return leave(code);
    if (!value) return leave(violate(INVALID_PARAM, "1.3", "value is NULL"));
    if (option < 0 || option >= SYS_OPTIONS) return leave(error(RT_PARAM_INVALID, "option %d", option));
    *value = sys_options[option];
    return leave(OK);
}

static int set_option(const char *symbol, int option, int64_t value) {
    int code = enter(symbol, CALLABLE, "%d, %lld", option, (long long)value);
    if (code) return leave(code);
    if (option < 0 || option >= SYS_OPTIONS) return leave(error(RT_PARAM_INVALID, "option %d", option));
    sys_options[option] = value;
    return leave(OK);
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
    return get_option("aclrtGetSysParamOpt", option, value);
}
int aclrtCtxGetSysParamOpt(int option, int64_t *value) {
    return get_option("aclrtCtxGetSysParamOpt", option, value);
}
int aclrtSetSysParamOpt(int option, int64_t value) {
    return set_option("aclrtSetSysParamOpt", option, value);
}
int aclrtCtxSetSysParamOpt(int option, int64_t value) {
    return set_option("aclrtCtxSetSysParamOpt", option, value);
}

int aclSetCompileopt(int option, const char *value) {
    int code = enter("aclSetCompileopt", CALLABLE, "%d, %s", option, value ? value : "NULL");
    if (code) return leave(code);
    if (!value) return leave(violate(INVALID_PARAM, "1.3", "value is NULL"));
    if (option < 0 || option >= COMPILE_OPTIONS) return leave(error(INVALID_PARAM, "option %d", option));
    snprintf(compile_options[option], TEXT, "%s", value);
    return leave(OK);
}

// Never 0: the client allocates this much and reads a text from it.
size_t aclGetCompileoptSize(int option) {
    enter("aclGetCompileoptSize", CALLABLE, "%d", option);
    leave(OK);
    return TEXT;
}

int aclGetCompileopt(int option, char *value, size_t size) {
    int code = enter("aclGetCompileopt", CALLABLE, "%d, %zu", option, size);
    if (code) return leave(code);
    if (!value || !size) return leave(violate(INVALID_PARAM, "1.3", "no room for the value"));
    bool known = option >= 0 && option < COMPILE_OPTIONS;
    snprintf(value, size, "%s", known ? compile_options[option] : "");
    return leave(OK);
}

static int accept(const char *symbol, long long value) {
    return leave(enter(symbol, CALLABLE, "%lld", value));
}

int aclrtSetDeviceSatMode(int mode) { return accept("aclrtSetDeviceSatMode", mode); }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return accept("aclrtSetOpExecuteTimeOut", seconds); }

int aclrtSetOpExecuteTimeOutV2(uint64_t wanted_us, uint64_t *actual_us) {
    int code = enter("aclrtSetOpExecuteTimeOutV2", CALLABLE, "%llu", (unsigned long long)wanted_us);
    if (!code && actual_us) *actual_us = wanted_us;
    return leave(code);
}

int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) {
    int code = enter("aclrtSetStreamOverflowSwitch", RUNTIME, "%p, %u", stream, flag);
    if (!code) kvd_stream(stream, &code);
    return leave(code);
}

int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
    int code = enter("aclrtGetStreamOverflowSwitch", RUNTIME, "%p", stream);
    if (!code) kvd_stream(stream, &code);
    if (code) return leave(code);
    if (!flag) return leave(violate(INVALID_PARAM, "1.5", "flag is NULL"));
    *flag = 0;
    return leave(OK);
}

int aclrtStreamGetId(void *stream, int32_t *id) {
    int code = enter("aclrtStreamGetId", RUNTIME, "%p", stream);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) return leave(code);
    if (!id) return leave(violate(INVALID_PARAM, "1.5", "id is NULL"));
    *id = (int32_t)s->handle.serial;
    return leave(OK);
}

int aclrtSetStreamAttribute(void *stream, int attribute, const void *value) {
    int code = enter("aclrtSetStreamAttribute", RUNTIME, "%p, %d", stream, attribute);
    if (!code) kvd_stream(stream, &code);
    if (!code && !value) code = violate(INVALID_PARAM, "1.5", "value is NULL");
    return leave(code);
}

// -- what a device is -------------------------------------------------------------------------------

// acl's aclDeviceInfo: 0 undefined, 1 AI cores, 2 vector cores, 3 L2 bytes.
int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    static const int attribute[] = {0, 101, 201, 302};
    int code = enter("aclGetDeviceCapability", CALLABLE, "%u, %d", device, what);
    if (code) return leave(code);
    if (!value) return leave(violate(INVALID_PARAM, "1.3", "value is NULL"));
    if (what < 1 || what > 3) return leave(error(INVALID_PARAM, "device info %d", what));
    return leave(kvd_device_info(device, attribute[what], value));
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    int code = enter("aclrtDeviceCanAccessPeer", CALLABLE, "%d, %d", device, peer);
    if (code) return leave(code);
    if (!can) return leave(violate(INVALID_PARAM, "1.3", "the answer is NULL"));
    int n = kvd_settings.devices;
    *can = device != peer && device >= 0 && peer >= 0 && device < n && peer < n;
    return leave(OK);
}

int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    int code = enter("aclrtDeviceEnablePeerAccess", RUNTIME, "%d, %u", peer, flags);
    if (code) return leave(code);
    if (peer < 0 || peer >= kvd_settings.devices)
        return leave(error(RT_INVALID_DEVICEID, "device %d of %d", peer, kvd_settings.devices));
    return leave(OK);
}

int aclrtDeviceGetBareTgid(int32_t *pid) {
    int code = enter("aclrtDeviceGetBareTgid", CALLABLE, "%s", "");
    if (code) return leave(code);
    if (!pid) return leave(violate(INVALID_PARAM, "1.3", "pid is NULL"));
    *pid = (int32_t)kvd_pid();
    return leave(OK);
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    int code = enter("aclrtGetPrimaryCtxState", CALLABLE, "%d", device);
    if (code) return leave(code);
    if (!active) return leave(violate(INVALID_PARAM, "1.3", "active is NULL"));
    if (flags) *flags = 0;
    *active = kvd_is_open(device);
    return leave(OK);
}

int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) {
    int code = enter("aclrtGetLogicDevIdByUserDevId", CALLABLE, "%d", user);
    if (code) return leave(code);
    if (!logic) return leave(violate(INVALID_PARAM, "1.3", "the answer is NULL"));
    *logic = user;
    return leave(OK);
}

// The CANN that the machine stands for: what the release notes of torch_npu 2.13 name.
int aclsysGetCANNVersion(int package, void *version) {
    enum { VERSION = 128, MODULE = 128 };  // aclCANNPackageVersion: two texts and numbers
    int code = enter("aclsysGetCANNVersion", CALLABLE, "%d", package);
    if (code) return leave(code);
    if (!version) return leave(violate(INVALID_PARAM, "1.2", "version is NULL"));
    memset(version, 0, VERSION);
    strcpy(version, KVD_CANN_VERSION);
    return leave(OK);
}

// -- logs and dumps ---------------------------------------------------------------------------------

// Silent by default, as the real one is, unless the variable that CANN reads turns it on.
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format,
               ...) {
    const char *wanted = getenv("ASCEND_SLOG_PRINT_TO_STDOUT");
    if (!wanted || strcmp(wanted, "1")) return;
    static const char *const levels[] = {"DEBUG", "INFO", "WARNING", "ERROR"};
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    printf("[%s] %s:%u %s: %s\n", levels[level >= 0 && level < 4 ? level : 3], file ? file : "", line,
           function ? function : "", text);
}

static int no_dump(const char *symbol) {
    int code = enter(symbol, CALLABLE, "%s", "");
    return leave(code ? code : error(RT_FEATURE_NOT_SUPPORT, "the emulated machine dumps no operators"));
}

int aclmdlInitDump(void) { return no_dump("aclmdlInitDump"); }
int aclmdlSetDump(const char *config) { return (void)config, no_dump("aclmdlSetDump"); }
int aclmdlFinalizeDump(void) { return no_dump("aclmdlFinalizeDump"); }

// -- kernels as binaries ----------------------------------------------------------------------------

static int no_binary(const char *symbol) {
    int code = enter(symbol, CALLABLE, "%s", "");
    return leave(code ? code : error(RT_FEATURE_NOT_SUPPORT,
                                     "the emulated machine runs no compiled device kernels"));
}

int aclrtBinaryLoadFromData(const void *data, size_t size, const void *options, void **binary) {
    return (void)data, (void)size, (void)options, (void)binary, no_binary("aclrtBinaryLoadFromData");
}
int aclrtBinaryGetFunction(const void *binary, const char *name, void **function) {
    return (void)binary, (void)name, (void)function, no_binary("aclrtBinaryGetFunction");
}
int aclrtGetFunctionAddr(void *function, void **cube, void **vector) {
    return (void)function, (void)cube, (void)vector, no_binary("aclrtGetFunctionAddr");
}
int rtDevBinaryRegister(const void *binary, void **handle) {
    return (void)binary, (void)handle, no_binary("rtDevBinaryRegister");
}
int rtFunctionRegister(void *binary, const void *stub, const char *name, const void *kernel,
                       uint32_t mode) {
    return (void)binary, (void)stub, (void)name, (void)kernel, (void)mode,
           no_binary("rtFunctionRegister");
}
int rtKernelLaunch(const void *stub, uint32_t blocks, void *arguments, uint32_t size, void *memory,
                   void *stream) {
    return (void)stub, (void)blocks, (void)arguments, (void)size, (void)memory, (void)stream,
           no_binary("rtKernelLaunch");
}
int rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length) {
    return (void)address, (void)length, no_binary("rtGetC2cCtrlAddr");
}

// -- profiler (CANN's toolchain/prof_api.h): nobody listens -----------------------------------------

uint64_t MsprofSysCycleTime(void) { return kvd_now_ns(); }
int32_t MsprofRegisterCallback(uint32_t module, void *handle) { return (void)module, (void)handle, 0; }
int32_t MsprofReportApi(uint32_t flag, const void *api) { return (void)flag, (void)api, 0; }
int32_t MsprofReportCompactInfo(uint32_t flag, const void *data, uint32_t size) {
    return (void)flag, (void)data, (void)size, 0;
}
int32_t MsprofReportAdditionalInfo(uint32_t flag, const void *data, uint32_t size) {
    return (void)flag, (void)data, (void)size, 0;
}
uint64_t MsprofGetHashId(const char *text, size_t size) {
    uint64_t hash = 0xCBF29CE484222325ull;  // FNV-1a
    for (size_t i = 0; text && i < size; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3ull;
    return hash;
}
