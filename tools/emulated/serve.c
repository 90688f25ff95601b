/* Calls functions of the C files on another processor or system, in the memory of the calling process:
   it requests a page at the first access, and returns changed pages when the function has ended. It reads
   a call as {function, position of the float, 20 arguments}; arguments are integers and the bits of the
   float. It writes {PAGE, address}, and reads the page then; {CHANGED, address of the page} with the old
   and the new page; and {RESULT, value}. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>

#define MOST_PAGES 65536
#define ARGUMENTS 20

enum { PAGE, CHANGED, RESULT };

#define F(name) void name(void);
FUNCTIONS
#undef F
#define F(name) name,
static void (*const functions[])(void) = {FUNCTIONS};

static int64_t count;
static volatile int locked;

static void finish(int code);
static int64_t transfer(int reads, char *buffer, size_t left); /* returns bytes, or ≤ 0 at the end */

static void all(int reads, void *buffer, size_t left)
{
    for (char *at = buffer; left;) {
        int64_t done = transfer(reads, at, left);
        if (done <= 0)
            finish(reads ? 0 : 4);
        at += done, left -= done;
    }
}

static void say(int64_t kind, int64_t value)
{
    int64_t frame[] = {kind, value};
    all(0, frame, sizeof frame);
}

#ifdef _WIN32
#include <windows.h>
#define SIZE 65536 /* of the smallest piece of memory at an address that one may choose */

static struct {
    char *at, *before;
} pages[MOST_PAGES / 16];

static void finish(int code) { ExitProcess(code); }

static int64_t transfer(int reads, char *buffer, size_t left)
{
    DWORD done = 0;
    HANDLE stream = GetStdHandle(reads ? STD_INPUT_HANDLE : STD_OUTPUT_HANDLE);
    int works = reads ? ReadFile(stream, buffer, left, &done, NULL)
                      : WriteFile(stream, buffer, left, &done, NULL);
    return works ? done : 0;
}

static LONG CALLBACK fetch(EXCEPTION_POINTERS *about)
{
    const EXCEPTION_RECORD *record = about->ExceptionRecord;
    if (record->ExceptionCode != EXCEPTION_ACCESS_VIOLATION)
        return EXCEPTION_CONTINUE_SEARCH;
    const uintptr_t address = record->ExceptionInformation[1];
    char *page = (char *)(address / SIZE * SIZE);
    while (__atomic_exchange_n(&locked, 1, __ATOMIC_ACQUIRE))
        SwitchToThread();
    int64_t known = 0;
    while (known < count && pages[known].at != page)
        known++;
    if (known == count) { /* no other thread was faster */
        DWORD access = PAGE_NOACCESS; /* other threads must not see the page before it is filled */
        SIZE_T written = 0;
        char *filled = VirtualAlloc(NULL, SIZE, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
        say(PAGE, (int64_t)address);
        all(1, filled, SIZE);
        if (VirtualAlloc(page, SIZE, MEM_COMMIT | MEM_RESERVE, access) != page)
            finish(6);
        if (!WriteProcessMemory(GetCurrentProcess(), page, filled, SIZE, &written) || written != SIZE
            || !VirtualProtect(page, SIZE, PAGE_READWRITE, &access))
            finish(7);
        pages[count].at = page, pages[count++].before = filled;
    }
    __atomic_store_n(&locked, 0, __ATOMIC_RELEASE);
    return EXCEPTION_CONTINUE_EXECUTION;
}

static void serve_faults(void) { AddVectoredExceptionHandler(1, fetch); }

static void give_back(void)
{
    for (int64_t p = 0; p < count; p++) {
        if (memcmp(pages[p].at, pages[p].before, SIZE)) {
            say(CHANGED, (int64_t)pages[p].at);
            all(0, pages[p].before, SIZE);
            all(0, pages[p].at, SIZE);
        }
        VirtualFree(pages[p].at, 0, MEM_RELEASE);
        VirtualFree(pages[p].before, 0, MEM_RELEASE);
    }
    count = 0;
}

/* The first four arguments are in registers, a float in one of its own: so this is the call of any function
   with at most 20 arguments and one float, which is in the third or fourth place or behind them. */
#define REST int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, \
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t

static int64_t call(void (*function)(void), int64_t place, const int64_t *i)
{
#define ARGUMENTS_BEHIND i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], \
    i[16], i[17], i[18], i[19]
    float real = 0;
    if (place >= 0)
        memcpy(&real, i + place, sizeof real);
    if (place == 2)
        return ((int64_t (*)(int64_t, int64_t, float, int64_t, REST))function)(
            i[0], i[1], real, i[3], ARGUMENTS_BEHIND);
    if (place == 3)
        return ((int64_t (*)(int64_t, int64_t, int64_t, float, REST))function)(
            i[0], i[1], i[2], real, ARGUMENTS_BEHIND);
    return ((int64_t (*)(int64_t, int64_t, int64_t, int64_t, REST))function)(
        i[0], i[1], i[2], i[3], ARGUMENTS_BEHIND);
}
#else
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#define SIZE 4096

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

static void finish(int code) { _exit(code); }

static int64_t transfer(int reads, char *buffer, size_t left)
{
    return reads ? read(0, buffer, left) : write(1, buffer, left);
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
        say(PAGE, (int64_t)about->si_addr);
        all(1, before[count], SIZE);
        char *made = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(made, before[count], SIZE);
        if (mremap(made, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page)
            _exit(6);
        pages[count++] = page;
    }
    __atomic_store_n(&locked, 0, __ATOMIC_RELEASE);
}

static void serve_faults(void)
{
    struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}

static void give_back(void)
{
    for (int64_t p = 0; p < count; p++) {
        if (memcmp(pages[p], before[p], SIZE)) {
            say(CHANGED, (int64_t)pages[p]);
            all(0, before[p], SIZE);
            all(0, pages[p], SIZE);
        }
        munmap(pages[p], SIZE);
    }
    count = 0;
}

/* Integers and floats are passed in registers of their own, further integers on the stack: so this is
   the call of any function with at most 20 arguments and one float. */
typedef int64_t any(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, float);

static int64_t call(void (*function)(void), int64_t place, const int64_t *given)
{
    int64_t i[ARGUMENTS + 1] = {0};
    float real = 0;
    memcpy(i, given, ARGUMENTS * sizeof *i);
    if (place >= 0) {
        memcpy(&real, i + place, sizeof real);
        memmove(i + place, i + place + 1, (ARGUMENTS - place) * sizeof *i);
    }
    return ((any *)function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11],
                             i[12], i[13], i[14], i[15], i[16], i[17], i[18], i[19], real);
}
#endif

int main(void)
{
    serve_faults();
    for (;;) {
        int64_t asked[2 + ARGUMENTS];
        all(1, asked, sizeof asked);
        const int64_t result = call(functions[asked[0]], asked[1], asked + 2);
        give_back();
        say(RESULT, result);
    }
}
