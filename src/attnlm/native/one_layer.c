/* The parts of one_layer.py that are more passes over memory than products. Axes as there.

   Attention of all heads of a batch: packed (B, T, 3·H·D) holds queries, keys and values, mixed
   (B, T, H·D) the heads' outputs; log_sums (B, H, T) is kept for the way back, where the weights are
   computed again: that is sooner done than reading them (Dao et al., 2022). LANES positions lie side
   by side, so that nothing is summed within a vector. SIZE, which is D, is given to the compiler, so
   that sums stay in registers. */

#include "vectors.h"

static int64_t filled(int64_t length) { return (length + LANES - 1) / LANES * LANES; }

int64_t attention_scratch(int64_t length)
{
    return 4 * SIZE * filled(length) + (length + 2) * filled(length);
}

/* Features first: (T, D), `stride` apart, times a factor, into (D, filled T). */
static void turn_over(int64_t length, const float *rows, int64_t stride, float factor,
                      float *columns)
{
    const int64_t width = filled(length);
    for (int64_t i = 0; i < SIZE; i++) {
        for (int64_t t = 0; t < length; t++)
            columns[i * width + t] = rows[t * stride + i] * factor;
        for (int64_t t = length; t < width; t++)
            columns[i * width + t] = 0;
    }
}

/* Which of LANES positions from `first` on come before `other`. */
INLINE integers before(int64_t first, int64_t other)
{
    integers lanes;
    for (int l = 0; l < LANES; l++)
        lanes[l] = l;
    return lanes < (integers){0} + (int32_t)(other - first);
}

/* A row's product with LANES columns, (D) · (D, LANES). */
INLINE vector along(const float *row, const float *columns, int64_t width)
{
    vector sum = {0};
    for (int64_t i = 0; i < SIZE; i++)
        sum += row[i] * load(columns + i * width);
    return sum;
}

static void attend_head(int64_t length, int64_t stride, float scale, const float *q, float *mixed,
                        int64_t mixed_stride, float *log_sums, float *scratch)
{
    const int64_t width = filled(length);
    const float *k = q + stride / 3, *v = k + stride / 3;
    float *queries = scratch, *weights = queries + SIZE * width;
    turn_over(length, q, stride, scale, queries);
    for (int64_t t = 0; t < length; t += LANES) {
        int64_t end = t + LANES < length ? t + LANES : length;
        vector largest, sum = {0}, outputs[SIZE];
        for (int64_t s = 0; s < end; s++) {
            vector score = along(k + s * stride, queries + t, width);
            score = either(before(t, s), (vector){0} - INFINITY, score);
            largest = s == 0 ? score : either(score > largest, score, largest);
            *(vector *)(weights + s * LANES) = score;
        }
        for (int64_t i = 0; i < SIZE; i++)
            outputs[i] = (vector){0};
        for (int64_t s = 0; s < end; s++) {
            vector weight = exp_of(load(weights + s * LANES) - largest);
            weight = either(before(t, s), (vector){0}, weight);
            sum += weight;
            for (int64_t i = 0; i < SIZE; i++)
                outputs[i] += v[s * stride + i] * weight;
        }
        for (int64_t l = 0; t + l < end; l++) {
            log_sums[t + l] = largest[l] + logf(sum[l]);
            for (int64_t i = 0; i < SIZE; i++)
                mixed[(t + l) * mixed_stride + i] = outputs[i][l] / sum[l];
        }
    }
}

static void attend_head_backward(int64_t length, int64_t stride, float scale, const float *q,
                                 const float *mixed, const float *d_mixed, int64_t mixed_stride,
                                 const float *log_sums, float *d_q, float *scratch)
{
    const int64_t width = filled(length);
    const float *k = q + stride / 3, *v = k + stride / 3;
    float *d_k = d_q + stride / 3, *d_v = d_k + stride / 3;
    float *queries = scratch, *keys = queries + SIZE * width, *values = keys + SIZE * width;
    float *grads = values + SIZE * width, *shared = grads + SIZE * width, *sums = shared + width;
    turn_over(length, q, stride, scale, queries);
    turn_over(length, k, stride, scale, keys);
    turn_over(length, v, stride, 1, values);
    turn_over(length, d_mixed, mixed_stride, 1, grads);
    for (int64_t t = 0; t < width; t++) {
        sums[t] = t < length ? log_sums[t] : 0;
        shared[t] = 0; /* Σ weight · its gradient, which the softmax takes away */
        for (int64_t i = 0; i < SIZE && t < length; i++)
            shared[t] += mixed[t * mixed_stride + i] * d_mixed[t * mixed_stride + i];
    }
    for (int64_t t = 0; t < length; t += LANES) { /* queries side by side */
        int64_t end = t + LANES < length ? t + LANES : length;
        vector outputs[SIZE];
        for (int64_t i = 0; i < SIZE; i++)
            outputs[i] = (vector){0};
        for (int64_t s = 0; s < end; s++) {
            vector score = along(k + s * stride, queries + t, width);
            vector weight = exp_of(score - load(sums + t));
            vector d_score = along(v + s * stride, grads + t, width);
            d_score = weight * (d_score - load(shared + t)) * scale;
            d_score = either(before(t, s), (vector){0}, d_score);
            for (int64_t i = 0; i < SIZE; i++)
                outputs[i] += k[s * stride + i] * d_score;
        }
        for (int64_t l = 0; t + l < end; l++)
            for (int64_t i = 0; i < SIZE; i++)
                d_q[(t + l) * stride + i] = outputs[i][l];
    }
    for (int64_t s = 0; s < length; s += LANES) { /* keys side by side */
        int64_t end = s + LANES < length ? s + LANES : length;
        vector key_outputs[SIZE], value_outputs[SIZE];
        for (int64_t i = 0; i < SIZE; i++)
            key_outputs[i] = value_outputs[i] = (vector){0};
        for (int64_t t = s; t < length; t++) {
            vector score = along(q + t * stride, keys + s, width);
            vector weight = exp_of(score - sums[t]);
            weight = either(before(s, t + 1), weight, (vector){0});
            vector d_score = along(d_mixed + t * mixed_stride, values + s, width);
            d_score = weight * (d_score - shared[t]) * scale;
            for (int64_t i = 0; i < SIZE; i++) {
                key_outputs[i] += q[t * stride + i] * d_score;
                value_outputs[i] += d_mixed[t * mixed_stride + i] * weight;
            }
        }
        for (int64_t l = 0; s + l < end; l++)
            for (int64_t i = 0; i < SIZE; i++) {
                d_k[(s + l) * stride + i] = key_outputs[i][l];
                d_v[(s + l) * stride + i] = value_outputs[i][l];
            }
    }
}

void attend(int64_t batch, int64_t length, int64_t heads, float scale, const float *packed,
            float *mixed, float *log_sums, float *scratch)
{
    const int64_t width = heads * SIZE;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            attend_head(length, 3 * width, scale, packed + b * length * 3 * width + h * SIZE,
                        mixed + b * length * width + h * SIZE, width,
                        log_sums + (b * heads + h) * length, scratch);
}

void attend_backward(int64_t batch, int64_t length, int64_t heads, float scale,
                     const float *packed, const float *mixed, const float *d_mixed,
                     const float *log_sums, float *d_packed, float *scratch)
{
    const int64_t width = heads * SIZE;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = b * length * width + h * SIZE, packed_at = b * length * 3 * width + h * SIZE;
            attend_head_backward(length, 3 * width, scale, packed + packed_at, mixed + at,
                                 d_mixed + at, width, log_sums + (b * heads + h) * length,
                                 d_packed + packed_at, scratch);
        }
}

/* In place, the gradient of the mean loss by the logits (M, V); the loss in nats into `loss`. */
void cross_entropy(int64_t rows, int64_t columns, float *logits, const int64_t *targets, float *loss)
{
    const int64_t whole = columns / LANES * LANES, rest = (columns - whole) * sizeof(float);
    double total = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *x = logits + r * columns;
        vector tail = (vector){0} - INFINITY;
        memcpy(&tail, x + whole, rest);
        vector largest = tail;
        for (int64_t c = 0; c < whole; c += LANES)
            largest = either(load(x + c) > largest, load(x + c), largest);
        float top = largest[0], at_target = x[targets[r]], sum = 0;
        for (int l = 1; l < LANES; l++)
            top = largest[l] > top ? largest[l] : top;
        tail = exp_of(tail - top);
        vector sums = tail;
        for (int64_t c = 0; c < whole; c += LANES) {
            vector e = exp_of(load(x + c) - top);
            *(vector *)(x + c) = e;
            sums += e;
        }
        for (int l = 0; l < LANES; l++)
            sum += sums[l];
        total += logf(sum) + (top - at_target);
        float scale = 1 / (sum * rows);
        for (int64_t c = 0; c < whole; c += LANES)
            *(vector *)(x + c) = load(x + c) * scale;
        tail *= scale;
        memcpy(x + whole, &tail, rest);
        x[targets[r]] -= 1.0f / rows;
    }
    *loss = total / rows;
}
