/* SPDX-License-Identifier: Apache-2.0
 *
 * One small pool of worker threads for the process.
 *
 * A job is a number of chunks that may run in any order.  The caller publishes it, then takes
 * chunks itself until none is left, so it never needs a worker to finish: a worker that the
 * system has not scheduled yet costs nothing.  The caller waits only for chunks that a worker is
 * executing.  Any number of threads may call at once; they share the workers.
 *
 * A worker that loses its core in the middle of a chunk holds its caller up until the system lets
 * it run again; no other thread may write those bytes meanwhile.  So small jobs stay on the caller
 * (parallel_bytes() in parallel.pyx), chunks are small, and a worker that was woken and has not run
 * since is not woken again.
 *
 * Fork: the pool's lock is held across fork() and the child starts with no workers, so a child
 * can call everything; it grows workers of its own when it first needs them.
 */
#ifndef KVCORE_PARALLEL_H
#define KVCORE_PARALLEL_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>

#define KV_MAX_WORKERS 1023

typedef void (*kv_body)(void *context, int64_t chunk);

typedef struct kv_job {
    kv_body body;
    void *context;
    int64_t n_chunks;
    int64_t next;      /* atomic: the next chunk to take                     */
    int64_t inside;    /* under the lock: workers that entered and not left  */
    int64_t wanted;    /* under the lock: how many more workers may enter    */
    pthread_cond_t left;
    struct kv_job *up, *down; /* the list of published jobs                  */
} kv_job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    kv_job *jobs;
    int workers;
    int idle;   /* wait for work                              */
    int waking; /* of these, were signalled and have not run  */
} kv_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, 0};

static void kv_fork_prepare(void) { pthread_mutex_lock(&kv_pool.lock); }
static void kv_fork_parent(void) { pthread_mutex_unlock(&kv_pool.lock); }
static void kv_fork_child(void)
{
    pthread_mutex_init(&kv_pool.lock, NULL);
    pthread_cond_init(&kv_pool.work, NULL);
    kv_pool.jobs = NULL;
    kv_pool.workers = kv_pool.idle = kv_pool.waking = 0;
}

static inline void kv_take_chunks(kv_job *job)
{
    for (;;) {
        int64_t chunk = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (chunk >= job->n_chunks)
            return;
        job->body(job->context, chunk);
    }
}

static void *kv_worker(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&kv_pool.lock);
    for (;;) {
        kv_job *job = kv_pool.jobs;
        while (job && !(job->wanted > 0
                        && __atomic_load_n(&job->next, __ATOMIC_RELAXED) < job->n_chunks))
            job = job->down;
        if (!job) {
            kv_pool.idle++;
            pthread_cond_wait(&kv_pool.work, &kv_pool.lock);
            kv_pool.idle--;
            if (kv_pool.waking > 0)
                kv_pool.waking--;
            continue;
        }
        job->wanted--;
        job->inside++;
        pthread_mutex_unlock(&kv_pool.lock);
        kv_take_chunks(job);
        pthread_mutex_lock(&kv_pool.lock);
        if (--job->inside == 0)
            pthread_cond_signal(&job->left);
    }
    return NULL;
}

/* Call this before the lock is first taken: a fork in between would leave the lock taken for ever. */
static void kv_pool_start(void) { pthread_atfork(kv_fork_prepare, kv_fork_parent, kv_fork_child); }

/* Grows the pool to `count` workers; fewer when the system refuses. Called under the lock. */
static void kv_grow(int count)
{
    while (kv_pool.workers < count) {
        pthread_t thread;
        pthread_attr_t attr;
        sigset_t all, old;
        pthread_attr_init(&attr);
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        /* Signals belong to the interpreter's own threads. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        int failed = pthread_create(&thread, &attr, kv_worker, NULL);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        pthread_attr_destroy(&attr);
        if (failed)
            return;
        kv_pool.workers++;
    }
}

static void kv_parallel_run(kv_body body, void *context, int64_t n_chunks, int n_threads)
{
    if (n_threads > n_chunks)
        n_threads = (int)n_chunks;
    if (n_threads <= 1) {
        for (int64_t chunk = 0; chunk < n_chunks; chunk++)
            body(context, chunk);
        return;
    }
    if (n_threads > KV_MAX_WORKERS + 1)
        n_threads = KV_MAX_WORKERS + 1;
    kv_job job = {body, context, n_chunks, 0, 0, n_threads - 1, PTHREAD_COND_INITIALIZER, NULL, NULL};
    pthread_mutex_lock(&kv_pool.lock);
    if (kv_pool.workers < n_threads - 1)
        kv_grow(n_threads - 1);
    job.down = kv_pool.jobs;
    if (job.down)
        job.down->up = &job;
    kv_pool.jobs = &job;
    for (int i = 1; i < n_threads && kv_pool.waking < kv_pool.idle; i++) {
        kv_pool.waking++;
        pthread_cond_signal(&kv_pool.work);
    }
    pthread_mutex_unlock(&kv_pool.lock);

    kv_take_chunks(&job);

    pthread_mutex_lock(&kv_pool.lock);
    if (job.up)
        job.up->down = job.down;
    else
        kv_pool.jobs = job.down;
    if (job.down)
        job.down->up = job.up;
    while (job.inside > 0)
        pthread_cond_wait(&job.left, &kv_pool.lock);
    pthread_mutex_unlock(&kv_pool.lock);
    pthread_cond_destroy(&job.left);
}

static int kv_pool_workers(void) { return kv_pool.workers; }

#endif
