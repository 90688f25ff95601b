/* SIMD vectors. LANES is the number of floats that one instruction of the processor computes. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef float vector4 __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vector load(const float *x) { return *(const vector *)x; }

/* Return `yes` in the lanes where `condition` is true, `no` in the others. */
INLINE vector blend(integers condition, vector yes, vector no)
{
    return (vector)(((integers)yes & condition) | ((integers)no & ~condition));
}

/* Return e^x for x ≤ 0, to within two units in the last place: 2^n · e^r with |r| ≤ ln 2 / 2. Unused
   lanes may hold any number, so the shift is on unsigned integers, which wrap around. */
INLINE vector vector_exp(vector x)
{
    x = blend(x < -87.0f, (vector){0} - 87.0f, x);
    vector shifted = x * 1.44269504f + 12582912.0f; /* its last bits are n */
    vector n = shifted - 12582912.0f;
    vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vector e = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666667f
        + r * (0.00833333333f + r * (0.00138888889f + r * 0.000198412698f))))));
    return e * (vector)(((bits)shifted << 23) + 0x3f800000);
}

/* Return 1 / (1 + e^−x), without overflow. */
INLINE vector sigmoid(vector x)
{
    const vector e = vector_exp(blend(x > 0, -x, x)), inverse = 1.0f / (1.0f + e);
    return blend(x > 0, inverse, e * inverse);
}

/* Return the sum of a vector's elements. */
INLINE float sum_lanes(vector x)
{
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += x[l];
    return sum;
}

/* Return the smaller number. */
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return `size` rounded up to whole vectors. */
INLINE int64_t round_up(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* Return a mask of the lanes l whose position, first + l, is less than `other`. */
INLINE integers mask_before(int64_t first, int64_t other)
{
    integers lanes;
    for (int l = 0; l < LANES; l++)
        lanes[l] = l;
    return lanes < (integers){0} + (int32_t)(other - first);
}
