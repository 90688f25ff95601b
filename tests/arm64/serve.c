/* Calls functions of a C file on another processor. Its memory is that of the process which asks: a
   page is requested at the first access to it, and returned when the function has ended if it changed.
   Frames: a call is read as {function, 20 integers, float as double}. Written are {PAGE, address},
   after which the page is read, {CHANGED, address} with the page, and {RESULT, value}. */

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_PAGES 65536
#define SIZE 4096
#define ARGUMENTS 20

enum { PAGE, CHANGED, RESULT };

#define F(name) void name(void);
FUNCTIONS
#undef F
#define F(name) name,
static void (*const functions[])(void) = {FUNCTIONS};

/* Integers and floats are passed in registers of their own, further integers on the stack: so this is
   the call of any function with at most 20 integers and one float. */
typedef int64_t any(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, float);

/* The C library's memset clears cache lines (dc zva), which qemu 7.2 does not repeat properly after a
   signal: 16 bytes kept their old values. */
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void *memset(void *to, int byte,
                                                                           size_t size)
{
    for (size_t i = 0; i < size; i++)
        ((char *)to)[i] = (char)byte;
    return to;
}

static char *pages[MOST_PAGES], before[MOST_PAGES][SIZE];
static int64_t count;
static volatile int locked;

static void all(int reads, void *buffer, size_t left)
{
    for (char *at = buffer; left;) {
        ssize_t done = reads ? read(0, at, left) : write(1, at, left);
        if (done <= 0)
            _exit(reads ? 0 : 4);
        at += done, left -= done;
    }
}

static void say(int64_t kind, int64_t value)
{
    int64_t frame[] = {kind, value};
    all(0, frame, sizeof frame);
}

static void fetch(int signal, siginfo_t *about, void *context)
{
    (void)signal, (void)context;
    char *page = (char *)((uintptr_t)about->si_addr / SIZE * SIZE);
    while (__atomic_exchange_n(&locked, 1, __ATOMIC_ACQUIRE))
        sched_yield();
    int64_t known = 0;
    while (known < count && pages[known] != page)
        known++;
    if (known == count) { /* no other thread was faster */
        if (count == MOST_PAGES)
            _exit(5);
        say(PAGE, (int64_t)page);
        all(1, before[count], SIZE);
        char *made = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(made, before[count], SIZE);
        if (mremap(made, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page)
            _exit(6);
        pages[count++] = page;
    }
    __atomic_store_n(&locked, 0, __ATOMIC_RELEASE);
}

int main(void)
{
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    struct {
        int64_t function, integers[ARGUMENTS];
        double real;
    } call;
    for (;;) {
        all(1, &call, sizeof call);
        const int64_t *i = call.integers;
        int64_t result = ((any *)functions[call.function])(
            i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
            i[14], i[15], i[16], i[17], i[18], i[19], (float)call.real);
        for (int64_t p = 0; p < count; p++) {
            if (memcmp(pages[p], before[p], SIZE)) {
                say(CHANGED, (int64_t)pages[p]);
                all(0, before[p], SIZE);
                all(0, pages[p], SIZE);
            }
            munmap(pages[p], SIZE);
        }
        count = 0;
        say(RESULT, result);
    }
}
