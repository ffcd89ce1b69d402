// SPDX-License-Identifier: Apache-2.0
// What the files of the double share.  One lock guards everything: a call takes it in enter() and
// gives it back in leave(); waiting for another thread is kvd_wait(), which lets it go.
#ifndef KVDOUBLE_H
#define KVDOUBLE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <time.h>

#include "abi.h"

#define KVD_CANN_VERSION "8.5.0"

// Internal symbols have a prefix, so that they never meet those of other libraries.
#define enter(...) kvd_enter(__VA_ARGS__)
#define leave(code) kvd_leave(code)
#define error(...) kvd_error(__VA_ARGS__)
#define violate(...) kvd_violate(__VA_ARGS__)

extern pthread_mutex_t kvd_lock;
// Waits until something has changed, at most to the deadline; false: that has passed.  Meanwhile the
// lock is free, and Python's too, if this thread held it: leave() takes that back.
bool kvd_wait(const struct timespec *deadline);
void kvd_notify(void);    // wakes all threads in kvd_wait
void kvd_wake_all(void);  // and every stream

// -- calls.c: handles, violations, calls, faults, texts -------------------------------------------

enum kind {
    H_CONTEXT, H_STREAM, H_STREAM_CONFIG, H_EVENT, H_GRAPH, H_TASK_GROUP, H_TENSOR, H_INT_ARRAY,
    H_TENSOR_LIST, H_EXECUTOR, H_PHYSICAL, H_SCALAR, H_KINDS,
};

struct handle {
    struct handle *next;            // of the same bucket
    struct handle *before, *after;  // of the same kind, oldest first
    enum kind kind;
    uint64_t serial;
};

void *kvd_create(enum kind kind, size_t size);
void kvd_destroy(void *handle);
bool kvd_is_live(const void *address, enum kind kind, uint64_t serial);  // serial 0: any
// The live handle, or NULL after a violation that says what was given instead.
void *kvd_check(const void *address, enum kind kind, const char *argument);
void kvd_each(enum kind kind, void (*visit)(void *handle, void *data), void *data);

enum {  // requirements of a call
    INIT = 1,        // 5.1: aclInit first
    CONTEXT = 2,     // 5.1: aclrtSetDevice in every calling thread
    CALLABLE = 4,    // may be called from a host function (1.7)
    AFTER = 8,       // a forced failure is reported after the work: frees, waits, phase two
    RUNTIME = INIT | CONTEXT,
};
// Takes the lock and records the call.  Non-zero: return leave(code) at once.
int kvd_enter(const char *symbol, unsigned needs, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int kvd_leave(int code);
int kvdouble_forked(void);  // this is a child of a process that had opened a device
int kvd_forced(void);  // the failure ordered for the call at hand, 0 if none
// Sets the text of aclGetRecentErrMsg; returns code.
int kvd_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// The same, and recorded as a broken rule of that section of the page.
int kvd_violate(int code, const char *section, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
long kvd_pid(void);
int kvd_async_fault(const char *symbol);  // the code ordered for the task just launched
const char *kvd_symbol(void);
const char *kvd_intern(const char *text);  // the same text, for ever
void kvd_set_symbol(const char *symbol);  // in a thread of the double's own

// -- device.c ---------------------------------------------------------------------------------------

enum soc { SOC_A2, SOC_A3, SOC_950, SOC_310P, SOC_OTHER };

struct context {
    struct handle handle;
    int device;
    bool primary;
    struct stream *default_stream;
};

struct settings {
    char soc_name[64];
    enum soc soc;
    int devices;
    uint64_t capacity;         // bytes of one device
    uint64_t budget;           // bytes of all devices and pinned memory together, 0: no limit
    bool eager, hold, poison;  // see README.md
    uint64_t patience_ns;      // streams begin by themselves after one to two of these; 0: never
    uint64_t give_up_ns;       // a wait for what nobody has launched ends after so long a silence
    bool quiet;                // calls are not recorded
    bool lenient_texts;        // a mode's text may be gone at phase two: torch_npu does so
    uint64_t workspace_extra;
    bool quirk_negative, quirk_no_nct_950, quirk_offset_nz, quirk_no_2d;
};
extern struct settings kvd_settings;
extern const char *const kvd_built_soc;  // from the generated settings.c
extern const int kvd_built_devices;

struct context *kvd_context(void);  // of this thread, NULL if none
bool kvd_initialized(void);
bool kvd_torn_down(void);  // by another party
void kvd_set_soc(const char *name);
void kvd_reset_devices(void);
int kvd_device_info(uint32_t device, int attribute, int64_t *value);
bool kvd_is_open(int device);
bool kvd_any_open(void);
// A host function may call nothing of the interface.  A callback runs on the thread that subscribed,
// and torch_npu's launch work from there; a wait could be for the stream that waits for it.
enum callback_kind { NO_CALLBACK, HOST_FUNCTION, REPORTED_CALLBACK };
enum callback_kind kvd_in_callback(void);
void kvd_set_in_callback(enum callback_kind kind);

// -- memory.c -----------------------------------------------------------------------------------------

enum place { PAGEABLE, PINNED, DEVICE, SWAPPED, STRAY };

struct block {
    enum place place;
    uintptr_t start;
    size_t size;
    unsigned char *bytes;   // where the memory really is
    bool owned;             // and not the caller's
    unsigned char *mapped;  // of reserved addresses: which granules have memory; else NULL
    int device;
    uint64_t serial;
    int pending;  // launched tasks that have not passed
    int refs;     // tasks and graphs that know it
    bool dead;
};

enum { GRANULE = 2 << 20 };  // of reserved addresses

enum place kvd_find(const void *address, struct block **block);
bool kvd_is_device_address(const void *address);
bool kvd_fits(const struct block *block, size_t offset, size_t size);
uintptr_t kvd_reserve(size_t size, size_t alignment);  // 0: no more addresses
unsigned char *kvd_alias(uintptr_t device_address);    // where its bytes are
struct block *kvd_add_reserved(uintptr_t start, size_t size, int device);
void kvd_forget_reserved(struct block *block);
void kvd_discard(struct block *block, size_t offset, size_t size);
bool kvd_charge(int device, uint64_t size);  // false: more than there is
void kvd_uncharge(int device, uint64_t size);
void kvd_drop_block(struct block *block);  // gives up one ref
size_t kvd_live_blocks(enum place place);
void kvd_reset_memory(void);
void kvd_remap_memory(void);  // in a forked child: the ranges, without anybody's bytes

// -- python.c -----------------------------------------------------------------------------------------

void kvd_let_python(void);    // gives the GIL back, if this thread holds it
void kvd_take_python(void);   // takes back what was given; without the machine's lock
void kvd_leave_python(void);  // at the end of a stream's thread
// Whether this thread, which waits, may run tasks of Python's meanwhile.  Without the machine's lock.
bool kvd_may_run_python(void);
void *kvd_swap_python(void *state);  // what kvd_take_python takes back; returns what it was
// Starts Python's part of the machine in a child process in which torch has not (aclInit calls it).
void kvd_complete_machine(void);

// -- copy.c -------------------------------------------------------------------------------------------

size_t kvdouble_num_blocking(void);
// An asynchronous copy whose addresses decide; of the library's own calls.
int kvd_copy_later(void *dst, const void *src, size_t size, void *stream);

// -- stream.c -----------------------------------------------------------------------------------------

struct touch {  // bytes of a block that a task reads or writes
    struct block *block;
    size_t start, size;
    bool write;
    uint64_t flags;  // of the journal
};

struct task {
    struct task *next;
    const char *symbol;
    int (*run)(struct task *task);  // without the lock; returns an asynchronous code
    void (*release)(struct task *task);
    // The operator with shapes and types of its tensors, which an update may not change.
    void (*describe)(const struct task *task, char *text, size_t size);
    void *data;
    struct touch *touches;
    int num_touches, room_touches;
    int fault;                   // ordered with kvdouble_fail_async
    struct recording *record;    // completes this
    struct recording *wait;      // begins after this
    bool external;               // record or wait that stays alive in a graph
    struct event *event;         // of an external record in a graph
    struct graph *graph;         // replays this
    struct block *workspace;     // with the bytes from workspace_start on
    size_t workspace_start, workspace_size;
    uint64_t position;
    uint64_t number, line, id;  // for the journal: this launch, the line of Python, its function
    bool late;                  // what of its touches it uses is known when it has run
    enum { BY_ITS_STREAM, BY_WAITERS, BY_PYTHON_WAITERS } runs;  // who may run it; see stream.c
    int refs;
    bool replaying;  // as a node of a graph
    bool replaced;   // meanwhile; the replay drops it
};

// Which tasks of which streams come before a point: what events order (5.8).
struct past {
    int count;
    struct { uint64_t stream, position; } *of;
};

struct recording {  // one aclrtRecordEvent
    uint64_t mark;  // in the journal, 0: not there
    int refs;
    bool done;
    int error;
    uint64_t time_ns;
    struct stream *stream;  // valid while not done
    uint64_t position;
    struct past past;
};

struct stream {
    struct handle handle;
    struct context *context;
    struct task *head, *tail;
    uint64_t enqueued, done, allowed, seen;  // seen: enqueued when the clock last ticked
    pthread_cond_t wake;
    int error;
    char *error_text;  // of the task that failed, if it said anything
    bool stop_on_error, aborting, closing, started, subscribed, used_host_func, used_callback;
    bool blocked;  // its thread waits for an event or to be allowed on
    bool busy;     // a thread runs its first task
    pthread_t thread, report_thread;
    uint32_t priority, flags;
    struct graph *capture;
    int capture_tail;
    struct update *update;  // tasks launched now replace those of a group
    struct past past;
    const struct task *pauses;    // the wait, also within a graph, for which its thread waits
    const struct task *hopeless;  // that wait, given up
};

extern uint64_t kvd_last_launch_ns;

struct task *kvd_new_task(int (*run)(struct task *));
void kvd_drop_task(struct task *task);
void kvd_room_for_touches(struct task *task, size_t more);
// Remembers that the task touches the memory; what: for the text.  Violation if out of bounds.
int kvd_touch(struct task *task, const void *address, size_t size, bool write, const char *what);
// A launched task that has not passed and touches these bytes, one of both writing; NULL if none.
struct task *kvd_pending(const void *address, size_t size, bool write);
// The live stream of this context (NULL: the default stream), or NULL with *code set.
struct stream *kvd_stream(const void *address, int *code);
int kvd_launch(struct stream *stream, struct task *task);
void kvd_count(struct task *task, int by);  // it is in flight, or no longer
void kvd_allow(struct stream *stream, uint64_t position);
// Waits; timeout_ms < 0: for ever.  False: time is over.
bool kvd_drain(struct stream *stream, uint64_t position, int64_t timeout_ms);
bool kvd_in_stream(void);  // this is a stream's thread
bool kvd_aborting(void);   // of a task: its stream drops its work
// The thread, which waits, runs the stream's tasks up to the position itself, as far as it may.
void kvd_help(struct stream *stream, uint64_t position);
// Of a wait that a stream's thread is about to pause for (NULL: it goes on): false once it is given up.
bool kvd_pause(const struct task *task);
void kvd_close_stream(struct stream *stream, bool drop_work);
int kvd_take_error(struct stream *stream);
void kvd_fault_text(const char *text);  // from a task: why it fails
uint64_t kvd_position_before(const struct past *past, const struct stream *stream);
void kvd_join(struct past *past, const struct past *other);
void kvd_join_stream(struct past *past, const struct stream *stream);
struct recording *kvd_new_recording(void);
void kvd_drop_recording(struct recording *recording);
void kvd_complete(struct recording *recording, int code);
uint64_t kvd_now_ns(void);
void kvd_deadline(struct timespec *at, int64_t ms);
void kvd_sync_all(int device);
void kvd_forget_clock(void);  // its thread is gone

// -- stuck.c ------------------------------------------------------------------------------------------

// As kvd_wait, for what streams do: finds queues that can never run.
bool kvd_wait_for_streams(const struct timespec *deadline);
int kvd_gave_up(const struct task *wait);  // the code of a wait that was given up

// -- value.c ------------------------------------------------------------------------------------------

bool kvd_word_holds(const struct task *wait);
bool kvd_word_ends(const struct task *write, const struct task *wait);

// -- journal.c ----------------------------------------------------------------------------------------

enum entry_kind {
    ENTRY_TASK = 1,    // number, stream, id, late, ranges; mark: the launch of the graph it is part of
    ENTRY_DONE,        // a late task: number, id, ranges, and why it failed
    ENTRY_MARK,        // the end of the stream as it is now is called mark
    ENTRY_WAIT,        // the stream waits for the mark
    ENTRY_JOIN,        // the host has waited for the mark
    ENTRY_DROP,        // the mark cannot be waited for any more
    ENTRY_HOST,        // the host touches ranges
    ENTRY_FREE,        // memory is given back
    ENTRY_NEW,         // memory is there
    ENTRY_RULE,        // a violation: section and text
    ENTRY_GRAPH,       // a replay begins: mark counts its nodes, which follow
    ENTRY_NODE,        // of the capture behind it: before and joins, counted from 1, 0 for none
    ENTRY_FORGET,      // the graph mark is gone
};

struct entry {
    uint64_t kind, number, stream, device, mark, line, id, thread;
    const char *symbol, *section;
    char *text;
    size_t first_range, num_ranges;
    int code;
    bool late;
};

enum { RANGE_WRITE = 1, RANGE_SPAN = 2 };  // SPAN: some bytes of it, named later

struct range {
    uint64_t start, end, flags;
};

struct trail {
    bool wanted;
    struct range *ranges;
    size_t count, room, last[2];
};

bool kvd_journal_on(void);
uint64_t kvd_line(void);
uint64_t kvdouble_line(uint64_t line);
uint64_t kvd_next_mark(void);
uint64_t kvd_next_tasks(uint64_t count);
void kvd_journal_task(const struct task *task, uint64_t number, const struct stream *stream,
                      uint64_t parent);
void kvd_journal_done(uint64_t number, uint64_t id, int code);
void kvd_journal_stream(enum entry_kind kind, const struct stream *stream, uint64_t mark);
void kvd_journal_mark(enum entry_kind kind, uint64_t mark);
struct entry *kvd_journal_host(void);
void kvd_journal_range(struct entry *entry, const void *address, size_t size, bool write);
void kvd_journal_block(enum entry_kind kind, const struct block *block, size_t offset, size_t size);
void kvd_journal_graph(const struct graph *graph);  // how its nodes hang together
void kvd_journal_replay(const struct task *task, const struct stream *stream);
void kvd_journal_violation(const char *section, const char *text);
void kvd_forget_journal(void);
void kvd_trail_begin(bool wanted);
void kvd_trail_end(void);
void kvd_trail_add(const struct block *block, const unsigned char *at, size_t size, bool write);
void kvd_set_task(uint64_t number);
uint64_t kvdouble_task(void);  // that this thread runs, 0: none

// -- event.c ------------------------------------------------------------------------------------------

enum event_made { BY_CREATE, BY_FLAG, BY_EX };

struct event {
    struct handle handle;
    enum event_made made;
    uint32_t flags;
    struct recording *last;
    bool waited;
    struct recording *last_wait;
    uint64_t captured_by;  // serial of a graph, 0: none
    int captured_node;
};

void kvd_forget_events(void);

// -- capture.c ----------------------------------------------------------------------------------------

struct node {
    struct task *task;
    int before, joins;  // nodes this one comes after, -1: none
};

struct graph {
    struct handle handle;
    struct stream *origin;
    int mode;
    pthread_t thread;
    bool capturing, invalid;
    struct node *nodes;
    int count, room, running, group_start;
};

int kvd_capture_task(struct stream *stream, struct task *task);
// Non-zero: the synchronous call is refused because of a capture (1.8).
int kvd_capture_refuses(void);
int kvd_callback_refuses(void);
void kvd_invalidate(struct graph *graph);
void kvd_skip_nodes(const struct task *replay, int first);
void kvd_free_graph(struct graph *graph);

// -- update.c -----------------------------------------------------------------------------------------

struct task_group {
    struct handle handle;
    struct graph *graph;
    uint64_t serial;  // of the graph
    int first, count;
};

int kvd_update_task(struct stream *stream, struct task *task);
void kvd_drop_update(struct stream *stream);

// -- tensor.c (libnnopbase) -----------------------------------------------------------------------------

enum { MAX_RANK = 8 };

struct tensor {
    struct handle handle;
    int rank, storage_rank, dtype, format;
    int64_t dims[MAX_RANK], strides[MAX_RANK], storage[MAX_RANK], offset;
    uint64_t data;
    char fault[160];  // why phase one refuses it
};

struct int_array {
    struct handle handle;
    uint64_t size;
    int64_t values[];
};

struct scalar {
    struct handle handle;
    int dtype;
    unsigned char value[16];
};

int kvd_bits(int dtype);  // of one element, 0: unknown
int64_t kvd_elements(const struct tensor *t);
int64_t kvd_storage_elements(const struct tensor *t);
bool kvd_contiguous(const struct tensor *t);
int64_t kvd_extent(const struct tensor *t);  // elements from the first to past the last

// -- formats.c --------------------------------------------------------------------------------------------

struct layout {  // of a contiguous tensor: its axes, and the pieces that its format stores
    int format, rank, storage_rank;
    int64_t dims[MAX_RANK], storage[MAX_RANK];
};

bool kvd_known_layout(const struct layout *layout);
void kvd_note_format(const struct layout *layout);  // a tensor gets it
int64_t kvd_layout_elements(const struct layout *layout);
bool kvd_storage_of(struct layout *layout, int format, size_t item);
void kvd_transfer(const struct layout *to, unsigned char *dst, const struct layout *from,
                  const unsigned char *src, size_t item);

// -- executor.c (libnnopbase) ---------------------------------------------------------------------------

enum { MAX_TENSORS = 12 };

struct view {  // a tensor as a kernel sees it
    bool present;
    struct tensor t;
    const struct tensor *handle;
    uint64_t serial;
    unsigned char *base;        // of the element at offset 0
    struct block *block;
    bool written;
};

struct call {
    const char *op;
    struct view v[MAX_TENSORS];
    int num_views;
    enum soc soc;
    int scenario;
    char cache_mode[16], scatter_mode[16];
    int64_t strides[2], offsets[2], block, pads[2 * MAX_RANK];
    unsigned char value[16];
    bool flag, copies, empty;
    int fault;
    struct settings settings;
};

struct op {
    const char *name, *phase_one;
    int num_tensors;
    const char *const *names;
    int (*kernel)(struct call *call);
    bool folds;    // 5.6: phase two folds every failure into 561000
    bool formats;  // its tensors may have any format
};

struct executor {
    struct handle handle;
    const struct op *op;
    const char *library;
    struct call call;
    uint64_t workspace, line;
    bool repeatable, may_repeat, ran;
    const char *strings[2];
    char copies[2][16];
};

struct phase_one {
    const struct op *op;
    const char *library;
    struct call call;
    const char *strings[2];
};

// Fills a view; non-zero: the aclnn code.  NULL is allowed when null_code is 0.
int kvd_view(struct phase_one *p, int index, const void *tensor, int null_code);
int kvd_text(struct phase_one *p, int index, const char *text, char *copy, const char *argument);
// Ends phase one well: makes the executor.
int kvd_finish(struct phase_one *p, uint64_t workspace, bool may_repeat, uint64_t *size,
                 void **executor);
int kvd_open_phase_one(struct phase_one *p, const struct op *op, const char *library,
                         uint64_t *size, void **executor);
int kvd_phase_two(const struct op *op, const char *library, const char *symbol, void *workspace,
                    uint64_t size, void *executor, const void *stream);

// The address of an element, or NULL (and a fault) when n bytes there leave the allocation.
unsigned char *kvd_at(struct call *c, struct view *v, int64_t element, int64_t bytes);
int64_t kvd_index(struct call *c, struct view *v, int64_t position);  // of an int32/int64 view
// A value no kernel survives: the stream fails with that code.
void kvd_kernel_fault(struct call *c, int code);
bool kvd_same_dims(const struct tensor *t, int rank, ...);  // int64_t each, -1: any
// Copies n elements, steps apart in each view.
void kvd_copy(struct call *c, struct view *dst, int64_t to, int64_t dst_step, struct view *src,
                int64_t from, int64_t src_step, int64_t n);

// -- numbers.c ------------------------------------------------------------------------------------------

float kvd_decode(const unsigned char *bytes, int dtype);
void kvd_encode(float value, unsigned char *bytes, int dtype);
bool kvd_is_float(int dtype);

// -- convert.c (libopapi) ---------------------------------------------------------------------------------

void kvd_convert(const unsigned char *from, int from_dtype, unsigned char *to, int to_dtype);

#endif
