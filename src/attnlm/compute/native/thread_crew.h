/* A crew: a team of threads that stay between runs and flush subnormal numbers to zero. For short runs, such
   as a token: to create a thread takes as long. */

#include <stdlib.h>

#include "thread_team.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define PATIENCE (16 * SPINS) /* as long as Python draws a token; then the thread sleeps */

struct crew {
    struct team team;
    _Atomic int64_t runs;          /* that were started */
    _Atomic int64_t numbers, left; /* the highest number of a thread; threads that have not ended */
    work *work;                    /* of the current run; NULL ends the threads */
    const void *argument;
    pthread_mutex_t lock;
    pthread_cond_t called;
};

/* Set the mode of this thread in which subnormal numbers are zero. Return the mode before. */
static uint64_t flush_subnormals(void)
{
    uint64_t mode = 0;
#if defined(__x86_64__)
    mode = _mm_getcsr();
    _mm_setcsr((unsigned)mode | 0x8040);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | 1 << 24));
#endif
    return mode;
}

static void set_mode(uint64_t mode)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

static void *serve(void *argument)
{
    struct crew *crew = argument;
    const struct member self = {&crew->team, ++crew->numbers};
    flush_subnormals();
    for (int64_t run = 0;; run++) {
        for (int64_t spins = 0; crew->runs == run && spins < PATIENCE; spins++)
            ;
        if (crew->runs == run) {
            pthread_mutex_lock(&crew->lock);
            while (crew->runs == run)
                pthread_cond_wait(&crew->called, &crew->lock);
            pthread_mutex_unlock(&crew->lock);
        }
        if (!crew->work)
            break;
        crew->work(self, crew->argument);
        barrier(self);
    }
    pthread_mutex_lock(&crew->lock); /* the calling thread may still hold it */
    pthread_mutex_unlock(&crew->lock);
    if (--crew->left == 0)
        free(crew);
    return NULL;
}

static void start_run(struct crew *crew, work *work, const void *argument)
{
    crew->work = work;
    crew->argument = argument;
    pthread_mutex_lock(&crew->lock);
    crew->runs++;
    pthread_cond_broadcast(&crew->called);
    pthread_mutex_unlock(&crew->lock);
}

/* Return a crew of `wanted` threads, with the calling thread; of fewer if no more can be created. */
struct crew *start_crew(int64_t wanted)
{
    struct crew *crew = calloc(1, sizeof(struct crew));
    if (!crew)
        return NULL;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->called, NULL);
    pthread_t thread;
    while (crew->left < wanted - 1 && !pthread_create(&thread, NULL, serve, crew)) {
        pthread_detach(thread);
        crew->left++;
    }
    crew->team.members = crew->left + 1;
    return crew;
}

/* End the threads, without waiting for them: a process that was forked does not have them. */
void end_crew(struct crew *crew)
{
    if (crew->team.members > 1)
        start_run(crew, NULL, NULL);
    else
        free(crew);
}

/* Run `work` in all threads of the crew, of which the calling thread is one. */
static void run_crew(struct crew *crew, work *work, const void *argument)
{
    const struct member self = {&crew->team, 0};
    const uint64_t mode = flush_subnormals();
    if (crew->team.members > 1)
        start_run(crew, work, argument);
    work(self, argument);
    barrier(self);
    set_mode(mode);
}
