/* A stand-in for the OpenMP runtime of gcc that runs the threads of a region one at a time, in an order drawn from a seed.
 *
 * Each thread runs up to the next barrier, chunk of a dynamic loop, `single`, `critical` or, now and then, function; then the
 * next thread is drawn.  So a result that depends on the order of threads, as without a barrier, differs from that of one
 * thread, and the same seed repeats it.  Threads are real ones, so that thread-local variables are their own.
 *
 * PYOPS_SCHEDULE: the seed.  0: in the order of their numbers; 1: in the opposite order; others: at random.
 * `make schedules` links it with objects that are compiled with -fopenmp -finstrument-functions.
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define PLAIN __attribute__((no_instrument_function))
/* Hidden, so that the library uses these functions, not another runtime's, or the empty functions of the C library. */
#define ENTRY PLAIN __attribute__((visibility("hidden")))
enum { MOST = 64, INTERRUPTS = 128 };   /* threads; functions entered for each interruption, on average */

typedef enum { READY, WAITING, DONE } state;
typedef struct {
    long next, end, step, chunk;
    int taken;
} share;      /* of a dynamic loop, or `single` */
typedef struct {
    int size, done, critical;           /* critical: 1 + the thread in a critical section, or 0 */
    state states[MOST];
    void (*body)(void *);
    void *data;
    share *shares;                      /* in the order in which threads meet them */
    int known, room;
} team;

static _Thread_local team *mine;        /* NULL outside a region */
static _Thread_local int number, met;   /* of this thread; the shares that it has met */
static pthread_mutex_t one_region = PTHREAD_MUTEX_INITIALIZER;
static sem_t turns[MOST];
static team *volatile work[MOST];       /* of the workers 1, 2, ... */
static int workers, wanted;             /* threads started; threads of a region */
static long seed = -1;
static uint64_t random_state;

PLAIN static uint64_t draw(uint64_t n) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state % n;
}

PLAIN __attribute__((visibility("default"))) void schedule_seed(long value) {
    seed = value;
    random_state = (uint64_t)value * UINT64_C(0x9E3779B97F4A7C15) | 1;
}

PLAIN static int next_of(team *t) {
    int ready[MOST], n = 0, waiting = 0;
    for (int i = 0; i < t->size; i++) {
        if (t->states[i] == READY) ready[n++] = i;
        waiting += t->states[i] == WAITING;
    }
    if (!n && waiting) {                /* all are at the barrier */
        for (int i = 0; i < t->size; i++)
            if (t->states[i] == WAITING) t->states[i] = READY, ready[n++] = i;
    }
    if (!n) return -1;
    return seed == 0 ? ready[0] : seed == 1 ? ready[n - 1] : ready[draw((uint64_t)n)];
}

/* Let another thread run, and wait for the next turn, unless this thread is done.  The last one wakes thread 0, which waits for
 * all; after that the team is gone. */
PLAIN static void turn(team *t, state s) {
    t->states[number] = s;
    const int drawn = next_of(t), next = drawn < 0 ? 0 : drawn;
    if (next == number) return;
    sem_post(turns + next);
    if (s == DONE && number) return;
    while (sem_wait(turns + number)) {}
}

PLAIN static void *worker(void *argument) {
    const int me = (int)(intptr_t)argument;
    for (;;) {
        while (sem_wait(turns + me)) {}
        team *const t = work[me];
        mine = t, number = me, met = 0;
        t->body(t->data);
        mine = NULL;
        turn(t, DONE);
    }
    return NULL;
}

PLAIN static void after_fork(void) { workers = 0; }        /* the threads did not come along */

PLAIN static void start(void) {
    static bool once;
    if (!once) {
        const char *const text = getenv("PYOPS_SCHEDULE"), *const threads = getenv("OMP_NUM_THREADS");
        if (seed < 0) schedule_seed(text ? atol(text) : 0);
        if (!wanted) wanted = threads && atoi(threads) > 0 ? atoi(threads) : 1;
        pthread_atfork(NULL, NULL, after_fork);
        once = true;
    }
    if (wanted > MOST) wanted = MOST;
}

PLAIN static void run(team *t) {
    team *const outer = mine;
    const int outer_number = number, outer_met = met;
    mine = t, number = 0, met = 0;
    if (t->size > 1) turn(t, READY);
    t->body(t->data);
    if (t->size > 1) turn(t, DONE);
    mine = outer, number = outer_number, met = outer_met;
    free(t->shares);
}

ENTRY void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    start();
    team t = {.size = mine ? 1 : threads ? (int)(threads > MOST ? MOST : threads) : wanted, .body = body, .data = data};
    if (t.size == 1) {
        run(&t);
        return;
    }
    pthread_mutex_lock(&one_region);
    if (!workers)
        for (int i = 0; i < MOST; i++) sem_init(turns + i, 0, 0);
    if (!workers) workers = 1;
    for (; workers < t.size; workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)workers)) abort();
        pthread_detach(thread);
    }
    for (int i = 1; i < t.size; i++) work[i] = &t;
    run(&t);
    pthread_mutex_unlock(&one_region);
}

/* ---- inside a region; outside of one, a thread is alone ---- */

PLAIN static bool is_shared(void) { return mine && mine->size > 1; }
PLAIN static void interrupt(void) {
    if (is_shared()) turn(mine, READY);
}

ENTRY void GOMP_barrier(void) {
    if (is_shared()) turn(mine, WAITING);
}

/* The share that this thread meets next; it may be the first. */
PLAIN static share *meet(void) {
    team *const t = mine;
    if (met == t->room) {
        t->room = t->room ? 2 * t->room : 16;
        t->shares = realloc(t->shares, (size_t)t->room * sizeof *t->shares);
        if (!t->shares) abort();
    }
    if (met == t->known) t->shares[t->known++] = (share){0};
    return t->shares + met++;
}

ENTRY bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *to) {
    interrupt();
    share *const s = mine->shares + met - 1;
    const long left = s->step > 0 ? s->end - s->next : s->next - s->end;
    if (left <= 0) return false;
    long end = s->next + s->chunk * s->step;
    if (s->step > 0 ? end > s->end : end < s->end) end = s->end;
    *from = s->next, *to = s->next = end;
    return true;
}

ENTRY bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *from, long *to) {
    share *const s = meet();
    if (!s->taken) *s = (share){start, end, step, chunk, 1};
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

ENTRY void GOMP_loop_end_nowait(void) {}
ENTRY void GOMP_loop_end(void) { GOMP_barrier(); }

ENTRY bool GOMP_single_start(void) {
    interrupt();
    share *const s = meet();
    return s->taken ? false : (s->taken = 1, true);
}

ENTRY void GOMP_critical_start(void) {
    interrupt();
    while (is_shared() && mine->critical) turn(mine, READY);
    if (mine) mine->critical = 1 + number;
}
ENTRY void GOMP_critical_end(void) {
    if (mine) mine->critical = 0;
}

ENTRY int omp_get_num_threads(void) { return mine ? mine->size : 1; }
ENTRY int omp_get_thread_num(void) { return mine ? number : 0; }
ENTRY int omp_get_max_threads(void) {
    start();
    return wanted;
}
/* Shares of threads follow their speeds.  These are drawn, so that the seed repeats them. */
ENTRY double omp_get_wtime(void) {
    static double now;
    return now += seed > 1 ? (double)(1 + draw(8)) : 1.0;
}
ENTRY void omp_set_num_threads(int threads) {
    start();
    wanted = threads < MOST ? threads : MOST;
}

ENTRY void __cyg_profile_func_enter(void *function, void *caller) {
    (void)function, (void)caller;
    if (is_shared() && seed > 1 && !draw(INTERRUPTS)) turn(mine, READY);
}
ENTRY void __cyg_profile_func_exit(void *function, void *caller) { (void)function, (void)caller; }
