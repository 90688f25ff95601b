/* The processor's vendor and vectors. */

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

/* Return the bits of the widest vectors that processor and system have, of those for which there are
   libraries: 512 (x86-64-v4), 256 (x86-64-v3), else 128. */
int64_t vector_bits(void)
{
#if defined(__x86_64__)
    const unsigned v3_1 = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA … AVX, F16C */
    const unsigned v3_7 = 1u << 3 | 1u << 5 | 1u << 8;                        /* BMI1, AVX2, BMI2 */
    const unsigned v4_7 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* AVX-512 F, DQ … VL */
    unsigned a, b, c, d, features, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & v3_1) != v3_1)
        return 128;
    if (!__get_cpuid_count(7, 0, &a, &features, &c, &d) || (features & v3_7) != v3_7)
        return 128;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* the registers that the system saves */
    if ((saved & 0x06) != 0x06)
        return 128;
    return (features & v4_7) == v4_7 && (saved & 0xe0) == 0xe0 ? 512 : 256;
#else
    return 128;
#endif
}
