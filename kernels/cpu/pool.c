/* A small thread pool for regions of a few microseconds.
 *
 * A region is `count` independent tasks. Which worker takes which task is left to chance; no task's result depends on
 * it. Generation, count and next index stand in one 64-bit ticket, so that a late worker cannot mistake a new region
 * for the one it read. Idle workers spin for about 50 microseconds (the gap between two regions of one step) and then
 * sleep on a condition variable.
 */
#include "zjcpu.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define COUNT_BITS 20
#define COUNT_MAX ((1u << COUNT_BITS) - 4096) /* the next index may run past the count by one for each worker */
#define SPINS_IDLE 8000
#define SPINS_WAIT 4000
#define THREADS_MAX 256

typedef struct {
    zj_pool *pool;
    int index;
} worker;

struct zj_pool {
    _Atomic uint64_t ticket; /* generation << 40 | count << 20 | next */
    char apart0[56];
    _Atomic uint32_t done;
    char apart1[60];
    zj_task task;
    void *job;
    _Atomic int sleepers, stop;
    int threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t *thread;
    worker *workers;
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_tasks(zj_pool *pool, int index) {
    for (;;) {
        uint64_t t = atomic_fetch_add_explicit(&pool->ticket, 1, memory_order_acq_rel);
        uint32_t next = t & ((1u << COUNT_BITS) - 1), count = (t >> COUNT_BITS) & ((1u << COUNT_BITS) - 1);
        if (next >= count) return;
        /* The region cannot end before this task is done, so task and job are still those of the ticket. */
        pool->task(pool->job, (int)next, index);
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
    }
}

static void *work(void *argument) {
    worker *self = argument;
    zj_pool *pool = self->pool;
    uint64_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        uint64_t generation = atomic_load_explicit(&pool->ticket, memory_order_acquire) >> (2 * COUNT_BITS);
        for (int spin = 0; generation == seen && spin < SPINS_IDLE; spin++) {
            relax();
            generation = atomic_load_explicit(&pool->ticket, memory_order_acquire) >> (2 * COUNT_BITS);
        }
        if (generation == seen) {
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleepers, 1);
            while (atomic_load(&pool->ticket) >> (2 * COUNT_BITS) == seen && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->lock);
            continue;
        }
        seen = generation;
        take_tasks(pool, self->index);
    }
    return NULL;
}

zj_pool *zj_pool_new(int threads) {
    if (threads < 1) threads = 1;
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    zj_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->thread = calloc((size_t)threads, sizeof *pool->thread);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (!pool->thread || !pool->workers) {
        free(pool->thread), free(pool->workers), free(pool);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = 1;
    for (int i = 1; i < threads; i++) { /* fewer threads than asked are no fault: the bits are the same */
        pool->workers[i] = (worker){pool, i};
        if (pthread_create(&pool->thread[i], NULL, work, &pool->workers[i])) break;
        pool->threads = i + 1;
    }
    return pool;
}

static void wake_all(zj_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

void zj_pool_free(zj_pool *pool) {
    atomic_store(&pool->stop, 1);
    wake_all(pool);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->thread), free(pool->workers), free(pool);
}

int zj_pool_threads(const zj_pool *pool) { return pool->threads; }

void zj_pool_run(zj_pool *pool, zj_task task, void *job, int count) {
    assert(count >= 0 && (unsigned)count < COUNT_MAX);
    if (pool->threads == 1 || count <= 1) {
        for (int i = 0; i < count; i++) task(job, i, 0);
        return;
    }
    pool->task = task;
    pool->job = job;
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> (2 * COUNT_BITS)) + 1;
    atomic_store(&pool->ticket, generation << (2 * COUNT_BITS) | (uint64_t)count << COUNT_BITS);
    if (atomic_load(&pool->sleepers)) wake_all(pool);
    take_tasks(pool, 0);
    for (int spin = 0; atomic_load_explicit(&pool->done, memory_order_acquire) != (uint32_t)count; spin++) {
        if (spin < SPINS_WAIT)
            relax();
        else
            sched_yield(); /* a worker lost its core: leave ours to it */
    }
}
