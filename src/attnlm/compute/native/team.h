/* A team of threads that call the same function. Each computes its part of a step, and all wait for
   each other before the next step. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_MEMBERS 64
#define SPINS 4000 /* some microseconds; a thread that waits longer yields its core */

struct team {
    _Atomic int64_t members; /* 0 until all threads exist */
    _Atomic int64_t arrived, passed;
};

struct member {
    struct team *team;
    int64_t number;
};

typedef void work(struct member, const void *about);

struct post {
    struct member who;
    work *work;
    const void *about;
};

struct range {
    int64_t begin, end;
};

/* Return the range of `count` items that a member computes. */
INLINE struct range share(struct member who, int64_t count)
{
    int64_t members = who.team->members;
    return (struct range){count * who.number / members, count * (who.number + 1) / members};
}

INLINE void wait_while(_Atomic int64_t *number, int64_t is)
{
    for (int64_t spins = 0; *number == is; spins++)
        if (spins >= SPINS)
            sched_yield();
}

/* Wait for all members. After it, each can read what any of them wrote before. */
INLINE void barrier(struct member who)
{
    struct team *team = who.team;
    if (team->members == 1)
        return;
    int64_t passed = team->passed;
    if (++team->arrived < team->members) {
        wait_while(&team->passed, passed);
    } else {
        team->arrived = 0;
        team->passed++;
    }
}

static void *take_part(void *given)
{
    struct post *post = given;
    wait_while(&post->who.team->members, 0);
    post->work(post->who, post->about);
    return NULL;
}

/* Call `work` in `wanted` threads, this one included, or in fewer if no more can be created. */
static void together(int64_t wanted, work *work, const void *about)
{
    struct team team = {0};
    struct post posts[MOST_MEMBERS];
    pthread_t threads[MOST_MEMBERS];
    int64_t members = 1;
    for (; members < wanted && members < MOST_MEMBERS; members++) {
        posts[members] = (struct post){{&team, members}, work, about};
        if (pthread_create(threads + members, NULL, take_part, posts + members))
            break;
    }
    team.members = members;
    work((struct member){&team, 0}, about);
    while (--members)
        pthread_join(threads[members], NULL);
}
