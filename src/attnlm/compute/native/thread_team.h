/* A team of threads that run the same function. Each member computes its range of a step. A barrier
   separates the steps. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_MEMBERS 64
#define SPINS 4000 /* some microseconds; a thread that waits longer yields its core */

struct team {
    _Atomic int64_t members; /* 0 until all threads exist */
    _Atomic int64_t arrived, phase;
};

struct member {
    struct team *team;
    int64_t number;
};

typedef void work(struct member, const void *argument);

struct thread_start {
    struct member self;
    work *work;
    const void *argument;
};

struct range {
    int64_t begin, end;
};

/* Return the range of `count` items that a member computes. */
INLINE struct range own_range(struct member self, int64_t count)
{
    int64_t members = self.team->members;
    return (struct range){count * self.number / members, count * (self.number + 1) / members};
}

INLINE void wait_while(_Atomic int64_t *number, int64_t value)
{
    for (int64_t spins = 0; *number == value; spins++)
        if (spins >= SPINS)
            sched_yield();
}

/* Wait for all members. What a member wrote before the barrier, every member can read after it. */
INLINE void barrier(struct member self)
{
    struct team *team = self.team;
    if (team->members == 1)
        return;
    int64_t phase = team->phase;
    if (++team->arrived < team->members) {
        wait_while(&team->phase, phase);
    } else {
        team->arrived = 0;
        team->phase++;
    }
}

static void *run_member(void *argument)
{
    struct thread_start *start = argument;
    wait_while(&start->self.team->members, 0);
    start->work(start->self, start->argument);
    return NULL;
}

/* Run `work` in `wanted` threads, including this one; in fewer if no more can be created. */
static inline void run_team(int64_t wanted, work *work, const void *argument)
{
    struct team team = {0};
    struct thread_start starts[MOST_MEMBERS];
    pthread_t threads[MOST_MEMBERS];
    int64_t members = 1;
    for (; members < wanted && members < MOST_MEMBERS; members++) {
        starts[members] = (struct thread_start){{&team, members}, work, argument};
        if (pthread_create(threads + members, NULL, run_member, starts + members))
            break;
    }
    team.members = members;
    work((struct member){&team, 0}, argument);
    while (--members)
        pthread_join(threads[members], NULL);
}
