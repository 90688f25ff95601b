/* The processor's vendor. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* Return 1 on processors of Intel, 0 on others. */
int64_t is_intel(void)
{
#if defined(__x86_64__)
    unsigned int most, name[3];
    if (__get_cpuid(0, &most, name, name + 2, name + 1)) /* in this order: EBX, EDX, ECX */
        return !memcmp(name, "GenuineIntel", sizeof name);
#endif
    return 0;
}
