// SPDX-License-Identifier: Apache-2.0
// Collectives of one rank (CANN's hccl/hccl.h).  One process is one machine, and no other rank can
// be reached: a communicator of more is refused, with a message.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

enum { HCCL_OK = 0, HCCL_PARA = 1, HCCL_NOT_SUPPORT = 5, ROOT_INFO = 4108 };

struct communicator {
    uint32_t ranks, rank;
};

static int refuse(const char *symbol, uint32_t ranks) {
    return error(HCCL_NOT_SUPPORT,
                 "%s: %u ranks; the emulated machine has collectives of one rank only", symbol, ranks);
}

int HcclGetRootInfo(void *info) {
    int code = enter("HcclGetRootInfo", CALLABLE, "%s", "");
    if (code) return leave(code);
    if (!info) return leave(violate(HCCL_PARA, "hccl", "rootInfo is NULL"));
    memset(info, 0, ROOT_INFO);
    return leave(HCCL_OK);
}

static int make(const char *symbol, uint32_t ranks, uint32_t rank, void **comm) {
    if (!comm || rank >= ranks) return violate(HCCL_PARA, "hccl", "rank %u of %u", rank, ranks);
    if (ranks != 1) return refuse(symbol, ranks);
    struct communicator *c = calloc(1, sizeof *c);
    if (!c) abort();
    *c = (struct communicator){ranks, rank};
    *comm = c;
    return HCCL_OK;
}

int HcclCommInitRootInfo(uint32_t ranks, const void *info, uint32_t rank, void **comm) {
    int code = enter("HcclCommInitRootInfo", RUNTIME, "%u, %u", ranks, rank);
    (void)info;
    return leave(code ? code : make("HcclCommInitRootInfo", ranks, rank, comm));
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const void *info, uint32_t rank, const void *config,
                               void **comm) {
    int code = enter("HcclCommInitRootInfoConfig", RUNTIME, "%u, %u", ranks, rank);
    (void)info, (void)config;
    return leave(code ? code : make("HcclCommInitRootInfoConfig", ranks, rank, comm));
}

int HcclCommInitAll(uint32_t devices, int32_t *list, void **comms) {
    int code = enter("HcclCommInitAll", RUNTIME, "%u", devices);
    (void)list;
    return leave(code ? code : make("HcclCommInitAll", devices, 0, comms));
}

int HcclCommDestroy(void *comm) {
    int code = enter("HcclCommDestroy", CALLABLE | AFTER, "%p", comm);
    if (code) return leave(code);
    free(comm);
    return leave(HCCL_OK);
}

int HcclGetCommAsyncError(void *comm, int *result) {
    int code = enter("HcclGetCommAsyncError", CALLABLE, "%p", comm);
    if (!code && result) *result = HCCL_OK;
    return leave(code);
}

// Bytes of one element of an HcclDataType.
static size_t width(int dtype) {
    static const size_t widths[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
    return dtype >= 0 && dtype < (int)(sizeof widths / sizeof *widths) ? widths[dtype] : 1;
}

// With one rank every collective is a copy, or nothing where input and output are one.
static int copied(const char *symbol, const void *from, void *to, uint64_t count, int dtype,
                  void *comm, void *stream) {
    int code = enter(symbol, RUNTIME, "%llu, %d", (unsigned long long)count, dtype);
    if (code) return leave(code);
    if (!comm) return leave(violate(HCCL_PARA, "hccl", "the communicator is NULL"));
    if (from == to || !count) return leave(HCCL_OK);
    return leave(kvd_copy_later(to, from, count * width(dtype), stream));
}

int HcclAllReduce(void *from, void *to, uint64_t count, int dtype, int op, void *comm, void *stream) {
    (void)op;
    return copied("HcclAllReduce", from, to, count, dtype, comm, stream);
}
int HcclAllGather(void *from, void *to, uint64_t count, int dtype, void *comm, void *stream) {
    return copied("HcclAllGather", from, to, count, dtype, comm, stream);
}
int HcclReduceScatter(void *from, void *to, uint64_t count, int dtype, int op, void *comm,
                      void *stream) {
    (void)op;
    return copied("HcclReduceScatter", from, to, count, dtype, comm, stream);
}
int HcclReduce(void *from, void *to, uint64_t count, int dtype, int op, uint32_t root, void *comm,
               void *stream) {
    (void)op, (void)root;
    return copied("HcclReduce", from, to, count, dtype, comm, stream);
}
int HcclBroadcast(void *buffer, uint64_t count, int dtype, uint32_t root, void *comm, void *stream) {
    (void)root;
    return copied("HcclBroadcast", buffer, buffer, count, dtype, comm, stream);
}

static int no_peer(const char *symbol) {
    int code = enter(symbol, CALLABLE, "%s", "");
    return leave(code ? code : refuse(symbol, 2));
}

int HcclSend(void *buffer, uint64_t count, int dtype, uint32_t to, void *comm, void *stream) {
    return (void)buffer, (void)count, (void)dtype, (void)to, (void)comm, (void)stream,
           no_peer("HcclSend");
}
int HcclRecv(void *buffer, uint64_t count, int dtype, uint32_t from, void *comm, void *stream) {
    return (void)buffer, (void)count, (void)dtype, (void)from, (void)comm, (void)stream,
           no_peer("HcclRecv");
}
