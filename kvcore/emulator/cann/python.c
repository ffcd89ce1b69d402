// SPDX-License-Identifier: Apache-2.0
// The interpreter of the process, if there is one.  It is looked up by name: the machine links no
// Python.
//
// Its lock (the GIL) and the machine's are never waited for in a circle, by three rules:
// a call that waits gives the GIL back first, if its thread holds it (kvd_let_python), and takes it
// again when it has left the machine's lock (kvd_take_python); a task of Python's runs on a stream's
// thread, or on one that waits for it and holds no mutex of torch_npu's (kvd_may_run_python), which
// holds no lock of the machine then; and a thread that waits for a mutex inside torch_npu, whose owner
// may wait for such a task, gives the GIL back meanwhile (kvdouble_patch).
#include "machine.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct {
    int (*initialized)(void);
    int (*check)(void);
    void *(*save)(void);
    void (*restore)(void *);
    int (*ensure)(void);
    void (*release)(int);
    void *(*own)(void);
} python;
static pthread_once_t looked = PTHREAD_ONCE_INIT;
static bool gone;  // the interpreter ends: no task of Python's may begin

static _Thread_local void *saved;

static void *find(const char *name) { return dlsym(RTLD_DEFAULT, name); }

static void look(void) {
    *(void **)&python.initialized = find("Py_IsInitialized");
    *(void **)&python.check = find("PyGILState_Check");
    *(void **)&python.save = find("PyEval_SaveThread");
    *(void **)&python.restore = find("PyEval_RestoreThread");
    *(void **)&python.ensure = find("PyGILState_Ensure");
    *(void **)&python.release = find("PyGILState_Release");
    *(void **)&python.own = find("PyGILState_GetThisThreadState");
}

static bool holds(void) {
    pthread_once(&looked, look);
    return python.check && python.initialized() && python.check();
}

void kvd_let_python(void) {
    if (!saved && holds()) saved = python.save();
}

void kvd_take_python(void) {
    void *state = saved;
    if (!state) return;
    saved = NULL;
    python.restore(state);
}

void *kvd_swap_python(void *state) {
    void *before = saved;
    saved = state;
    return before;
}

// torch starts the machine in a child process (entry points of torch.backends), unless a variable
// tells it to load no back end: then aclInit, of the thread that uses torch_npu first, is the chance.
// It is the one function that may take the GIL: once, before there is anything to wait for.
void kvd_complete_machine(void) {
    static bool asked;
    const char *wanted = getenv("KVCORE_EMULATE");
    pthread_once(&looked, look);
    if (asked || !wanted || !*wanted || !python.ensure || !python.initialized()) return;
    asked = true;
    int (*run_text)(const char *);
    *(void **)&run_text = find("PyRun_SimpleString");
    int state = python.ensure();
    if (run_text) run_text("import _kvcore_torch\n_kvcore_torch.autoload()\n");
    python.release(state);
}

// -- tasks ------------------------------------------------------------------------------------------

struct python_task {
    int (*run)(void *object, bool kept);
    void *object;
    bool captured, forgotten;
    char *text;
};

// Objects whose tasks were dropped, for Python to let go of: the thread that drops one may hold the
// machine's lock.
static void **dropped;
size_t kvdouble_num_dropped;  // Python looks at it before it asks
static size_t room_dropped;

static void give_back(void *object) {
    if (kvdouble_num_dropped == room_dropped) {
        room_dropped = 2 * room_dropped + 256;
        dropped = realloc(dropped, room_dropped * sizeof *dropped);
        if (!dropped) abort();
    }
    dropped[kvdouble_num_dropped++] = object;
}

static void drop(struct task *t) {
    struct python_task *p = t->data;
    if (!p->forgotten) give_back(p->object);  // otherwise Python let go of it when it ran
    free(p->text);
    free(p);
}

// The stream's thread keeps its state of the interpreter from its first task to its end: making one
// costs as much as a small task.
static _Thread_local void *own_state;

static int run(struct task *t) {
    struct python_task *p = t->data;
    if (__atomic_load_n(&gone, __ATOMIC_ACQUIRE)) return OK;
    if (!own_state && python.ensure && kvd_in_stream()) {
        python.ensure();
        own_state = python.save();
    }
    p->forgotten = !p->captured;
    return p->run(p->object, p->captured);
}

static void describe(const struct task *t, char *text, size_t size) {
    const struct python_task *p = t->data;
    snprintf(text, size, "%s", p->text ? p->text : t->symbol);
}

// From within a task: the text of its failure.
void kvdouble_task_failed(const char *text) { kvd_fault_text(text); }

void kvd_leave_python(void) {
    enum { UNLOCKED = 1 };  // PyGILState_STATE
    if (!own_state || __atomic_load_n(&gone, __ATOMIC_ACQUIRE)) return;
    python.restore(own_state);
    python.release(UNLOCKED);
    own_state = NULL;
}

// The same text, for ever: what a task is called.
const char *kvdouble_intern(const char *text) {
    pthread_mutex_lock(&kvd_lock);
    text = kvd_intern(text);
    pthread_mutex_unlock(&kvd_lock);
    return text;
}

// An object of Python's as a task, in stream order, captured like any other.
// symbol: of kvdouble_intern.  function: runs the object; kept: it will be run again, or given back,
// and otherwise Python lets go of it.  An object that is refused is given back too.  id: for the
// journal.  touches: three numbers each, an address, a size and flags (RANGE_WRITE, RANGE_SPAN).
// text: the operator with shapes and types, which an update may not change; or NULL.  for_waiters: a
// thread that waits for it may run it, for it runs no code of Python's.
int kvdouble_launch(void *stream, const char *symbol, int (*function)(void *object, bool kept),
                    void *object, uint64_t id, const uint64_t *touches, size_t count,
                    const char *text, bool for_waiters) {
    int code = enter(symbol, RUNTIME, "%p, %llu", stream, (unsigned long long)id);
    struct stream *s = code ? NULL : kvd_stream(stream, &code);
    if (!s) {
        give_back(object);
        return leave(code);
    }
    pthread_once(&looked, look);
    struct task *t = kvd_new_task(run);
    struct python_task *p = malloc(sizeof *p);
    if (!p) abort();
    bool kept = s->capture || s->update;
    *p = (struct python_task){function, object, kept, false, kept && text ? strdup(text) : NULL};
    t->data = p;
    t->release = drop;
    t->describe = describe;
    t->runs = for_waiters ? BY_PYTHON_WAITERS : BY_ITS_STREAM;
    t->id = id;
    kvd_room_for_touches(t, count);
    for (size_t i = 0; i < count && !code; i++) {
        const uint64_t *one = touches + 3 * i;
        int before = t->num_touches;
        code = kvd_touch(t, (void *)(uintptr_t)one[0], one[1], one[2] & RANGE_WRITE, "an argument");
        if (t->num_touches > before) t->touches[before].flags = one[2];
        t->late = t->late || one[2] & RANGE_SPAN;
    }
    if (code) {
        kvd_drop_task(t);
        return leave(code);
    }
    return leave(kvd_launch(s, t));
}

// Objects given back since the last call, at most room of them.
size_t kvdouble_dropped(void **objects, size_t room) {
    pthread_mutex_lock(&kvd_lock);
    size_t n = kvdouble_num_dropped < room ? kvdouble_num_dropped : room;
    if (n) memcpy(objects, dropped + kvdouble_num_dropped - n, n * sizeof *objects);
    kvdouble_num_dropped -= n;
    pthread_mutex_unlock(&kvd_lock);
    return n;
}

void kvdouble_python_gone(void) { __atomic_store_n(&gone, true, __ATOMIC_RELEASE); }

// -- calls inside torch_npu -------------------------------------------------------------------------
// Some functions that libtorch_npu.so calls are replaced in the process; its file stays as it is.

static _Thread_local int locked;  // mutexes of torch_npu's that this thread holds

static int counted(int code) {
    if (!code) locked++;
    return code;
}

static int give_and_lock(pthread_mutex_t *mutex) {
    int code = pthread_mutex_trylock(mutex);
    if (code != EBUSY || !holds()) return counted(code == EBUSY ? pthread_mutex_lock(mutex) : code);
    void *state = python.save();
    code = pthread_mutex_lock(mutex);
    python.restore(state);
    return counted(code);
}

static int try_lock(pthread_mutex_t *mutex) { return counted(pthread_mutex_trylock(mutex)); }

static int unlock(pthread_mutex_t *mutex) {
    if (locked) locked--;
    return pthread_mutex_unlock(mutex);
}

static int read_lock(pthread_rwlock_t *lock) { return counted(pthread_rwlock_rdlock(lock)); }
static int write_lock(pthread_rwlock_t *lock) { return counted(pthread_rwlock_wrlock(lock)); }

static int unlock_either(pthread_rwlock_t *lock) {
    if (locked) locked--;
    return pthread_rwlock_unlock(lock);
}

// Set by Python: whether a kernel of torch's does on this thread what it does on a stream's.  What the
// collector frees meanwhile may take a mutex of torch_npu's, so this thread must hold none.
static bool (*plain)(void);

void kvdouble_plain(bool (*function)(void)) { plain = function; }

bool kvd_may_run_python(void) {
    pthread_once(&looked, look);
    return plain && !locked && !__atomic_load_n(&gone, __ATOMIC_ACQUIRE) && python.own &&
           python.own() && plain();
}

// std::thread::join of a thread that stayed behind in the process that forked.
static void (*real_join)(void **thread);

static void join(void **thread) {
    if (kvdouble_forked()) *thread = NULL;  // its number: the object no longer stands for a thread
    else real_join(thread);
}

static const struct {
    const char *name;
    void *function;
} anew[] = {
    {"pthread_mutex_lock", give_and_lock},
    {"pthread_mutex_trylock", try_lock},
    {"pthread_mutex_unlock", unlock},
    {"pthread_rwlock_rdlock", read_lock},
    {"pthread_rwlock_wrlock", write_lock},
    {"pthread_rwlock_unlock", unlock_either},
    {"_ZNSt6thread4joinEv", join},
};

struct search {
    const char *library;
    int patched;
};

// A slot that the linker filled may be read-only by now.
static void put(void **slot, void *value) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)slot & ~(page - 1);
    if (mprotect((void *)start, page, PROT_READ | PROT_WRITE)) return;
    *slot = value;
}

static int patch(const ElfW(Rela) *rela, size_t size, const ElfW(Sym) *symbols, const char *names,
                 uintptr_t base) {
    int n = 0;
    for (size_t i = 0; rela && i < size / sizeof *rela; i++) {
        size_t symbol = ELF64_R_SYM(rela[i].r_info);
        for (size_t k = 0; symbol && k < sizeof anew / sizeof *anew; k++) {
            if (strcmp(names + symbols[symbol].st_name, anew[k].name)) continue;
            if (anew[k].function == (void *)join && !real_join) continue;
            put((void **)(base + rela[i].r_offset), anew[k].function);
            n++;
        }
    }
    return n;
}

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    struct search *search = data;
    const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    (void)size;
    if (!name || strcmp(name + 1, search->library)) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const ElfW(Rela) *jumps = NULL, *others = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    size_t jumps_size = 0, others_size = 0;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *at = (const void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB) symbols = at;
        if (dynamic->d_tag == DT_STRTAB) names = at;
        if (dynamic->d_tag == DT_JMPREL) jumps = at;
        if (dynamic->d_tag == DT_PLTRELSZ) jumps_size = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) others = at;
        if (dynamic->d_tag == DT_RELASZ) others_size = dynamic->d_un.d_val;
    }
    if (!symbols || !names) return 0;
    search->patched += patch(jumps, jumps_size, symbols, names, info->dlpi_addr);
    search->patched += patch(others, others_size, symbols, names, info->dlpi_addr);
    return 1;
}

// Lets a loaded library wait for its mutexes without the GIL, and end in a forked child; returns how
// many of its functions were replaced.
int kvdouble_patch(const char *library) {
    struct search search = {library, 0};
    pthread_once(&looked, look);
    *(void **)&real_join = find("_ZNSt6thread4joinEv");
    dl_iterate_phdr(visit, &search);
    return search.patched;
}
