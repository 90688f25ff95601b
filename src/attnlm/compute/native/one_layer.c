/* Attention of all heads of a batch, for one_layer.py, with the same axes: the operations whose time
   is memory traffic rather than matmuls.

   packed (B, T, 3·H·D) has queries, keys and values; mixed (B, T, H·D) has the heads' outputs; kept
   (B, H, 2, T) has the largest score and the inverse sum of each query's softmax, for the backward
   pass. It computes the weights again, which is faster than reading them (Dao et al., 2022). A vector
   holds scores of LANES queries, or D features of a sum of rows, so nothing is summed within a vector.
   SIZE, which is D, is a constant of the compilation, so that sums stay in registers. */

#include "vectors.h"

#if SIZE <= 8
#define ROW 8
#elif SIZE <= 16
#define ROW 16
#elif SIZE <= 32
#define ROW 32
#elif SIZE <= 64
#define ROW 64
#else
#error "a row has no room for so large a head"
#endif
#define PARTS (ROW > LANES ? ROW / LANES : 1)      /* vectors of a row */
#define ACROSS (ROW / PARTS)                       /* elements of a part */
#define SOME (PARTS <= 2 ? 4 : PARTS <= 4 ? 2 : 1) /* outputs at once; LANES is a multiple */

typedef float part __attribute__((vector_size(4 * ACROSS), aligned(4), may_alias));

static int64_t filled(int64_t length) { return (length + LANES - 1) / LANES * LANES; }

int64_t attention_kept(int64_t length) { return 2 * filled(length); }

int64_t attention_scratch(int64_t length) { return 2 * length * filled(length); }

/* Transpose up to LANES rows (T, D), `stride` apart, times a factor, to (D, LANES). */
INLINE void turn_over(vector *columns, const float *rows, int64_t stride, int64_t count,
                      float factor)
{
    for (int64_t i = 0; i < SIZE; i++) {
        columns[i] = (vector){0};
        for (int64_t t = 0; t < count; t++)
            columns[i][t] = rows[t * stride + i] * factor;
    }
}

/* Mark the positions among LANES, from `first` on, that come before `other`. */
INLINE integers before(int64_t first, int64_t other)
{
    integers lanes;
    for (int l = 0; l < LANES; l++)
        lanes[l] = l;
    return lanes < (integers){0} + (int32_t)(other - first);
}

/* Return the product of a row and LANES columns, (D) · (D, LANES). */
INLINE vector along(const float *one, const vector *columns)
{
    vector even = {0}, odd = {0};
    for (int64_t i = 0; i < SIZE; i += 2)
        even += one[i] * columns[i];
    for (int64_t i = 1; i < SIZE; i += 2)
        odd += one[i] * columns[i];
    return even + odd;
}

/* Return part p of a row, padded with zeros after SIZE elements. A whole part is read by one
   instruction: compilers may copy it in two halves, and the processor then waits for both stores. */
INLINE part read_part(const float *row, const int p)
{
    part read = {0};
    if (SIZE >= (p + 1) * ACROSS)
        return *(const part *)(row + p * ACROSS);
    if (SIZE > p * ACROSS)
        memcpy(&read, row + p * ACROSS, (SIZE - p * ACROSS) * sizeof(float));
    return read;
}

INLINE void write_part(float *row, const int p, part values)
{
    if (SIZE >= (p + 1) * ACROSS)
        *(part *)(row + p * ACROSS) = values;
    else if (SIZE > p * ACROSS)
        memcpy(row + p * ACROSS, &values, (SIZE - p * ACROSS) * sizeof(float));
}

/* For `some` outputs j: Σ weights[j · across + r · down] · row r, over `count` rows. */
INLINE void sum_some(const int some, int64_t count, const float *weights, int64_t across,
                     int64_t down, const float *rows, int64_t stride, float *out,
                     int64_t out_stride)
{
    part sums[SOME * PARTS] = {{0}};
    for (int64_t r = 0; r < count; r++)
        for (int p = 0; p < PARTS; p++) {
            const part one = read_part(rows + r * stride, p);
            for (int j = 0; j < some; j++)
                sums[j * PARTS + p] += one * weights[j * across + r * down];
        }
    for (int j = 0; j < some; j++)
        for (int p = 0; p < PARTS; p++)
            write_part(out + j * out_stride, p, sums[j * PARTS + p]);
}

/* For each query t: Σ weights (s, t) · row s, over the keys s ≤ t. */
static void sum_keys(int64_t length, const float *weights, const float *rows, int64_t stride,
                     float *out, int64_t out_stride)
{
    const int64_t width = filled(length);
    int64_t t = 0;
    for (; t + SOME <= length; t += SOME) /* weights of later keys are 0 */
        sum_some(SOME, t + SOME, weights + t, 1, width, rows, stride, out + t * out_stride,
                 out_stride);
    for (; t < length; t++)
        sum_some(1, t + 1, weights + t, 1, width, rows, stride, out + t * out_stride, out_stride);
}

/* For each key s: Σ weights (s, t) · row t, over the queries t ≥ s. */
static void sum_queries(int64_t length, const float *weights, const float *rows, int64_t stride,
                        float *out, int64_t out_stride)
{
    const int64_t width = filled(length);
    int64_t s = 0;
    for (; s + SOME <= length; s += SOME)
        sum_some(SOME, length - s, weights + s * width + s, width, 1, rows + s * stride, stride,
                 out + s * out_stride, out_stride);
    for (; s < length; s++)
        sum_some(1, length - s, weights + s * width + s, width, 1, rows + s * stride, stride,
                 out + s * out_stride, out_stride);
}

static void attend_head(int64_t length, int64_t stride, float scale, const float *q, float *mixed,
                        int64_t mixed_stride, float *kept, float *weights)
{
    const int64_t width = filled(length);
    const float *k = q + stride / 3, *v = k + stride / 3;
    for (int64_t t = 0; t < length; t += LANES) {
        const int64_t end = t + LANES < length ? t + LANES : length;
        vector queries[SIZE], largest = (vector){0} - INFINITY, sum = {0};
        turn_over(queries, q + t * stride, stride, end - t, scale);
        for (int64_t s = 0; s < end; s++) {
            vector score = along(k + s * stride, queries);
            score = either(before(t, s), (vector){0} - INFINITY, score);
            largest = either(score > largest, score, largest);
            *(vector *)(weights + s * width + t) = score;
        }
        for (int64_t s = 0; s < end; s++) {
            vector weight = exp_of(load(weights + s * width + t) - largest);
            weight = either(before(t, s), (vector){0}, weight);
            sum += weight;
            *(vector *)(weights + s * width + t) = weight;
        }
        vector share = 1 / sum;
        for (int64_t s = 0; s < end; s++)
            *(vector *)(weights + s * width + t) = load(weights + s * width + t) * share;
        *(vector *)(kept + t) = largest;
        *(vector *)(kept + width + t) = share;
    }
    sum_keys(length, weights, v, stride, mixed, mixed_stride);
}

static void attend_head_backward(int64_t length, int64_t stride, float scale, const float *q,
                                 const float *mixed, const float *d_mixed, int64_t mixed_stride,
                                 const float *kept, float *d_q, float *weights)
{
    const int64_t width = filled(length);
    const float *k = q + stride / 3, *v = k + stride / 3;
    float *d_scores = weights + length * width;
    for (int64_t t = 0; t < length; t += LANES) {
        const int64_t end = t + LANES < length ? t + LANES : length;
        vector queries[SIZE], outputs[SIZE], grads[SIZE], shared = {0};
        turn_over(queries, q + t * stride, stride, end - t, scale);
        turn_over(outputs, mixed + t * mixed_stride, mixed_stride, end - t, 1);
        turn_over(grads, d_mixed + t * mixed_stride, mixed_stride, end - t, scale);
        for (int64_t i = 0; i < SIZE; i++) /* Σ weight · its gradient, which softmax subtracts */
            shared += outputs[i] * grads[i];
        for (int64_t s = 0; s < end; s++) {
            vector score = along(k + s * stride, queries);
            vector weight = exp_of(score - load(kept + t)) * load(kept + width + t);
            weight = either(before(t, s), (vector){0}, weight);
            *(vector *)(weights + s * width + t) = weight;
            *(vector *)(d_scores + s * width + t) = weight * (along(v + s * stride, grads) - shared);
        }
    }
    sum_keys(length, d_scores, k, stride, d_q, stride);
    sum_queries(length, d_scores, q, stride, d_q + stride / 3, stride);
    sum_queries(length, weights, d_mixed, mixed_stride, d_q + stride / 3 * 2, stride);
}

void attend(int64_t batch, int64_t length, int64_t heads, float scale, const float *packed,
            float *mixed, float *kept, float *scratch)
{
    const int64_t width = heads * SIZE;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            attend_head(length, 3 * width, scale, packed + b * length * 3 * width + h * SIZE,
                        mixed + b * length * width + h * SIZE, width,
                        kept + (b * heads + h) * attention_kept(length), scratch);
}

void attend_backward(int64_t batch, int64_t length, int64_t heads, float scale,
                     const float *packed, const float *mixed, const float *d_mixed,
                     const float *kept, float *d_packed, float *scratch)
{
    const int64_t width = heads * SIZE;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = b * length * width + h * SIZE, packed_at = b * length * 3 * width + h * SIZE;
            attend_head_backward(length, 3 * width, scale, packed + packed_at, mixed + at,
                                 d_mixed + at, width,
                                 kept + (b * heads + h) * attention_kept(length),
                                 d_packed + packed_at, scratch);
        }
}
