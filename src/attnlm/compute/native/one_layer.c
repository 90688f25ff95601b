/* Attention of all heads of a batch, for training/one_layer.py, with the same axes.

   packed (B, T, 3·H·D) has queries, keys and values; mixed (B, T, H·D) has the heads' outputs; kept
   (B, H, 2, T) has the largest score and the inverse sum of each query's softmax, for the backward
   pass, which computes the softmax again: this is faster than reading it (Dao et al., 2022). A vector
   holds scores of LANES queries, or D features of a sum of rows, so no sum is within a vector.

   `row` is the number of features in a row: 8, 16, 32 or 64. It is a constant of each instance of the
   functions, so that sums stay in registers. Rows of other sizes are copied and padded with zeros. */

#include "simd.h"

#include "arena.h"

#define WIDEST 64
#define ONE_LAYER_SUMS (WIDEST / LANES > 8 ? WIDEST / LANES : 8) /* vectors */

/* Return the number of vectors that hold a row. The last one may extend beyond the row. */
INLINE int num_vectors(const int row) { return row > LANES ? row / LANES : 1; }

/* Return the number of outputs that are summed together; it divides LANES. */
INLINE int rows_at_once(const int row)
{
    return num_vectors(row) <= 2 ? 4 : num_vectors(row) <= 4 ? 2 : 1;
}

/* Transpose up to LANES rows, times `factor`, to `row` vectors, in blocks of 4 × 4. */
INLINE void transpose(const int row, const float *rows, int64_t stride, int64_t count, float factor,
                      vector *columns)
{
    float copy[LANES * WIDEST];
    if (count < LANES) {
        memset(copy, 0, LANES * row * sizeof(float));
        for (int64_t t = 0; t < count; t++)
            memcpy(copy + t * row, rows + t * stride, row * sizeof(float));
        rows = copy;
        stride = row;
    }
    for (int t = 0; t < LANES; t += 4, rows += 4 * stride)
        for (int i = 0; i < row; i += 4) {
            const vector4 a = *(vector4 *)(rows + i), b = *(vector4 *)(rows + stride + i);
            const vector4 c = *(vector4 *)(rows + 2 * stride + i),
                          d = *(vector4 *)(rows + 3 * stride + i);
            for (int l = 0; l < 4; l++)
                *(vector4 *)((float *)(columns + i + l) + t) =
                    (vector4){a[l], b[l], c[l], d[l]} * factor;
        }
}

/* Return the dot products of a row and LANES columns, (D) · (D, LANES). */
INLINE vector dot_columns(const int row, const float *features, const vector *columns)
{
    vector even = {0}, odd = {0};
    for (int i = 0; i < row; i += 2)
        even += features[i] * columns[i];
    for (int i = 1; i < row; i += 2)
        odd += features[i] * columns[i];
    return even + odd;
}

/* Write Σ factors[j · output_step + r · row_step] · row r over `count` rows, for outputs
   j < `at_once`. */
INLINE void sum_outputs(const int row, const int at_once, int64_t count, const float *factors,
                        int64_t output_step, int64_t row_step, const float *rows, int64_t stride,
                        float *out, int64_t out_stride)
{
    const int vectors = num_vectors(row);
    vector sums[ONE_LAYER_SUMS] = {{0}};
    for (int64_t r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++) {
            const vector features = load(rows + r * stride + v * LANES);
            for (int j = 0; j < at_once; j++)
                sums[j * vectors + v] += features * factors[j * output_step + r * row_step];
        }
    for (int j = 0; j < at_once; j++)
        memcpy(out + j * out_stride, sums + j * vectors, row * sizeof(float));
}

/* Write Σ factors (s, t) · row s over the keys s ≤ t, for each query t. */
INLINE void sum_keys(const int row, int64_t length, const float *factors, const float *rows,
                     int64_t stride, float *out, int64_t out_stride)
{
    const int64_t width = round_up(length), at_once = rows_at_once(row);
    int64_t t = 0;
    for (; t + at_once <= length; t += at_once) /* factors of later keys are 0 */
        sum_outputs(row, rows_at_once(row), t + at_once, factors + t, 1, width, rows, stride,
                    out + t * out_stride, out_stride);
    for (; t < length; t++)
        sum_outputs(row, 1, t + 1, factors + t, 1, width, rows, stride, out + t * out_stride,
                    out_stride);
}

/* Write Σ factors (s, t) · row t over the queries t ≥ s, for each key s. */
INLINE void sum_queries(const int row, int64_t length, const float *factors, const float *rows,
                        int64_t stride, float *out, int64_t out_stride)
{
    const int64_t width = round_up(length), at_once = rows_at_once(row);
    int64_t s = 0;
    for (; s + at_once <= length; s += at_once)
        sum_outputs(row, rows_at_once(row), length - s, factors + s * width + s, width, 1,
                    rows + s * stride, stride, out + s * out_stride, out_stride);
    for (; s < length; s++)
        sum_outputs(row, 1, length - s, factors + s * width + s, width, 1, rows + s * stride, stride,
                    out + s * out_stride, out_stride);
}

/* Queries, keys and values of a head, its outputs, and their gradients, with the strides between two
   tokens. `d_q` and `d_mixed` are NULL in the forward pass. */
struct head {
    const float *q, *k, *v;
    int64_t stride;
    float *mixed;
    const float *d_mixed;
    int64_t mixed_stride;
    float *d_q, *d_k, *d_v, *kept;
};

/* The queries t to t + LANES − 1. `delta` is Σ p · d_p over the keys, p their probabilities. */
struct queries {
    int64_t t;
    vector queries[WIDEST], grads[WIDEST];
    vector largest, inverse, delta;
};

/* Write the scores of some keys, and update the largest score of each query. With `masked`, scores of
   keys after their query are −∞. */
INLINE void scores(const int row, const int masked, int64_t begin, int64_t count, const struct head *h,
                   struct queries *q, float *out, int64_t width)
{
    vector largest = q->largest;
    for (int64_t i = 0, s = begin; i < count; i++, s++) {
        vector score = dot_columns(row, h->k + s * h->stride, q->queries);
        if (masked)
            score = blend(mask_before(q->t, s), (vector){0} - INFINITY, score);
        largest = blend(score > largest, score, largest);
        *(vector *)(out + s * width + q->t) = score;
    }
    q->largest = largest;
}

/* Replace scores by exp(score − largest). Return `sum` plus these exponentials. */
INLINE vector exponentials(const int masked, int64_t begin, int64_t count, const struct queries *q,
                           vector sum, float *out, int64_t width)
{
    for (int64_t i = 0, s = begin; i < count; i++, s++) {
        vector exponential = vector_exp(load(out + s * width + q->t) - q->largest);
        if (masked)
            exponential = blend(mask_before(q->t, s), (vector){0}, exponential);
        sum += exponential;
        *(vector *)(out + s * width + q->t) = exponential;
    }
    return sum;
}

INLINE void attend(const int row, int64_t length, float scale, const struct head *h,
                   float *probabilities)
{
    const int64_t width = round_up(length);
    for (int64_t t = 0; t < length; t += LANES) {
        const int64_t count = smaller(length - t, LANES);
        struct queries q = {.t = t, .largest = (vector){0} - INFINITY};
        transpose(row, h->q + t * h->stride, h->stride, count, scale, q.queries);
        scores(row, 0, 0, t, h, &q, probabilities, width);
        scores(row, 1, t, count, h, &q, probabilities, width);
        const vector sum = exponentials(0, 0, t, &q, (vector){0}, probabilities, width);
        const vector inverse = 1 / exponentials(1, t, count, &q, sum, probabilities, width);
        for (int64_t s = 0; s < t + count; s++)
            *(vector *)(probabilities + s * width + t) = load(probabilities + s * width + t) * inverse;
        *(vector *)(h->kept + t) = q.largest;
        *(vector *)(h->kept + width + t) = inverse;
    }
    sum_keys(row, length, probabilities, h->v, h->stride, h->mixed, h->mixed_stride);
}

/* Write the probabilities of some keys, and the gradients of their scores. */
INLINE void softmax_backward(const int row, const int masked, int64_t begin, int64_t count,
                             const struct head *h, const struct queries *q, float *probabilities,
                             float *d_scores, int64_t width)
{
    const vector largest = q->largest, inverse = q->inverse, delta = q->delta;
    for (int64_t i = 0, s = begin; i < count; i++, s++) {
        vector score = dot_columns(row, h->k + s * h->stride, q->queries);
        vector probability = vector_exp(score - largest) * inverse;
        if (masked)
            probability = blend(mask_before(q->t, s), (vector){0}, probability);
        *(vector *)(probabilities + s * width + q->t) = probability;
        *(vector *)(d_scores + s * width + q->t)
            = probability * (dot_columns(row, h->v + s * h->stride, q->grads) - delta);
    }
}

INLINE void attend_backward(const int row, int64_t length, float scale, const struct head *h,
                            float *probabilities, float *d_scores)
{
    const int64_t width = round_up(length);
    for (int64_t t = 0; t < length; t += LANES) {
        const int64_t count = smaller(length - t, LANES);
        struct queries q;
        vector outputs[WIDEST];
        q.t = t;
        q.largest = load(h->kept + t);
        q.inverse = load(h->kept + width + t);
        transpose(row, h->q + t * h->stride, h->stride, count, scale, q.queries);
        transpose(row, h->mixed + t * h->mixed_stride, h->mixed_stride, count, 1, outputs);
        transpose(row, h->d_mixed + t * h->mixed_stride, h->mixed_stride, count, scale, q.grads);
        vector delta = {0};
        for (int i = 0; i < row; i++) /* Σ p · d_p */
            delta += outputs[i] * q.grads[i];
        q.delta = delta;
        softmax_backward(row, 0, 0, t, h, &q, probabilities, d_scores, width);
        softmax_backward(row, 1, t, count, h, &q, probabilities, d_scores, width);
    }
    sum_keys(row, length, d_scores, h->k, h->stride, h->d_q, h->stride);
    sum_queries(row, length, d_scores, h->q, h->stride, h->d_k, h->stride);
    sum_queries(row, length, probabilities, h->d_mixed, h->mixed_stride, h->d_v, h->stride);
}

/* Scratch memory for a head. */
struct buffers {
    float *probabilities, *d_scores;    /* (keys, queries), rows of whole vectors */
    float *packed_rows, *d_packed_rows; /* (T, 3, row): padded copies */
    float *mixed_rows, *d_mixed_rows;   /* (T, row) */
};

static int64_t row_of(int64_t size) { return size <= 8 ? 8 : size <= 16 ? 16 : size <= 32 ? 32 : 64; }

static void assign_buffers(int64_t length, int64_t size, struct arena *arena, struct buffers *b)
{
    const int64_t all = length * row_of(size);
    b->probabilities = take(arena, length * round_up(length));
    b->d_scores = take(arena, length * round_up(length));
    b->packed_rows = take(arena, 3 * all);
    b->d_packed_rows = take(arena, 3 * all);
    b->mixed_rows = take(arena, all);
    b->d_mixed_rows = take(arena, all);
    take(arena, LANES); /* the last vector of a row may extend beyond it */
}

#define INSTANCE(row) \
    static void compute_##row(int64_t length, float scale, const struct head *h, \
                              const struct buffers *b) \
    { \
        if (h->d_q) \
            attend_backward(row, length, scale, h, b->probabilities, b->d_scores); \
        else \
            attend(row, length, scale, h, b->probabilities); \
    }
INSTANCE(8)
INSTANCE(16)
INSTANCE(32)
INSTANCE(64)

/* Copy rows to longer rows, padded with zeros, or to shorter rows, without the padding. */
static void copy_rows(int64_t length, const float *from, int64_t stride, int64_t size, float *to,
                      int64_t to_stride, int64_t to_size)
{
    for (int64_t t = 0; t < length; t++, from += stride, to += to_stride)
        for (int64_t i = 0; i < to_size; i++)
            to[i] = i < size ? from[i] : 0;
}

/* Compute a head by the instance for its size, with padded copies of its rows if necessary. */
static void compute(int64_t length, int64_t size, float scale, struct head h, const struct buffers *b)
{
    const int64_t row = row_of(size), stride = 3 * row;
    void (*const instance)(int64_t, float, const struct head *, const struct buffers *)
        = row == 8 ? compute_8 : row == 16 ? compute_16 : row == 32 ? compute_32 : compute_64;
    if (size == row) {
        instance(length, scale, &h, b);
        return;
    }
    float *rows = b->packed_rows, *d_rows = b->d_packed_rows;
    float *mixed = b->mixed_rows, *d_mixed = b->d_mixed_rows;
    struct head padded = {.q = rows, .k = rows + row, .v = rows + 2 * row, .stride = stride,
                          .mixed = mixed, .mixed_stride = row, .kept = h.kept};
    copy_rows(length, h.q, h.stride, size, rows, stride, row);
    copy_rows(length, h.k, h.stride, size, rows + row, stride, row);
    copy_rows(length, h.v, h.stride, size, rows + 2 * row, stride, row);
    if (!h.d_q) {
        instance(length, scale, &padded, b);
        copy_rows(length, mixed, row, row, h.mixed, h.mixed_stride, size);
        return;
    }
    padded.d_mixed = d_mixed;
    padded.d_q = d_rows;
    padded.d_k = d_rows + row;
    padded.d_v = d_rows + 2 * row;
    copy_rows(length, h.mixed, h.mixed_stride, size, mixed, row, row);
    copy_rows(length, h.d_mixed, h.mixed_stride, size, d_mixed, row, row);
    instance(length, scale, &padded, b);
    copy_rows(length, d_rows, stride, row, h.d_q, h.stride, size);
    copy_rows(length, d_rows + row, stride, row, h.d_k, h.stride, size);
    copy_rows(length, d_rows + 2 * row, stride, row, h.d_v, h.stride, size);
}

/* Return the number of floats that the forward pass saves per head. */
int64_t one_layer_kept(int64_t length) { return 2 * round_up(length); }

/* Return the number of scratch floats. */
int64_t one_layer_scratch(int64_t length, int64_t size)
{
    struct arena arena = {0};
    struct buffers buffers;
    assign_buffers(length, size, &arena, &buffers);
    return arena.used;
}

/* Compute all heads, of at most WIDEST features: forward, or backward if `d_packed` is not NULL.
   `packed`, `mixed` and `d_mixed` are followed by memory for LANES more numbers. */
void one_layer_attend(int64_t batch, int64_t length, int64_t heads, int64_t size, float scale,
                      const float *packed, float *mixed, float *kept, const float *d_mixed,
                      float *d_packed, float *scratch)
{
    const int64_t width = heads * size;
    struct buffers buffers;
    assign_buffers(length, size, &(struct arena){.base = scratch}, &buffers);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < heads; i++) {
            const int64_t at = b * length * width + i * size;
            const float *q = packed + 3 * b * length * width + i * size;
            float *d_q = d_packed ? d_packed + (q - packed) : NULL;
            struct head h = {.q = q, .k = q + width, .v = q + 2 * width, .stride = 3 * width,
                             .mixed = mixed + at, .mixed_stride = width,
                             .kept = kept + (b * heads + i) * one_layer_kept(length)};
            if (d_q) {
                h.d_mixed = d_mixed + at;
                h.d_q = d_q;
                h.d_k = d_q + width;
                h.d_v = d_q + 2 * width;
            }
            compute(length, size, scale, h, &buffers);
        }
}
