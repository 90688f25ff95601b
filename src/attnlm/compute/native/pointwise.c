/* Fused pointwise operations, forward and backward, for one thread: parts of a block (block.c), and
   the loss of the one-layer form. Rows are contiguous; `d_x` is the gradient of the loss with respect
   to x, and `grad` that with respect to the output. */

#include "simd.h"

#include "pointwise.h"

/* GELU with tanh: x · σ(2 √(2/π) (x + 0.044715 x³)). Beyond ±16, σ is 0 or 1. */
#define GELU_LINEAR 1.5957691216f
#define GELU_CUBIC 0.0713548162726f

INLINE vector clamp(vector x)
{
    x = blend(x > 16, (vector){0} + 16, x);
    return blend(x < -16, (vector){0} - 16, x);
}

INLINE vector gelu_sigma(vector x) { return sigmoid(x * (GELU_LINEAR + GELU_CUBIC * x * x)); }

/* Return the derivative of GELU. `sigma` is gelu_sigma(x). */
INLINE vector gelu_slope(vector x, vector sigma)
{
    return sigma * (1 + x * (1 - sigma) * (GELU_LINEAR + 3 * GELU_CUBIC * x * x));
}

void gelu_and_slope(int64_t count, float *x, float *out)
{
    for (int64_t i = 0; i < count; i += LANES) {
        const vector a = load_partial(x + i, count - i), b = clamp(a);
        const vector sigma = gelu_sigma(b);
        store_partial(out + i, a * sigma, count - i);
        store_partial(x + i, gelu_slope(b, sigma), count - i);
    }
}

INLINE float inverse_rms(int64_t width, const float *x, float epsilon)
{
    vector squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const vector a = load_partial(x + i, width - i);
        squares += a * a;
    }
    return 1 / sqrtf(sum_lanes(squares) / width + epsilon);
}

/* Write x / √(mean x² + ε) · gain for each row to `out`, and 1 / √(mean x² + ε) to `inverse`. */
void rms_norm(int64_t rows, int64_t width, float epsilon, const float *x, const float *gain,
              float *out, float *inverse)
{
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        inverse[r] = inverse_rms(width, x, epsilon);
        for (int64_t i = 0; i < width; i += LANES)
            store_partial(
                out + i, load_partial(x + i, width - i) * inverse[r] * load_partial(gain + i, width - i),
                width - i);
    }
}

/* Write d_x, and add to d_gain. */
INLINE void rms_norm_row_backward(int64_t width, float inverse, const float *x, const float *gain,
                                  const float *grad, float *d_x, float *d_gain)
{
    vector dot = {0};
    for (int64_t i = 0; i < width; i += LANES)
        dot += load_partial(grad + i, width - i) * load_partial(gain + i, width - i)
                 * load_partial(x + i, width - i);
    const float coefficient = sum_lanes(dot) / width * inverse * inverse;
    for (int64_t i = 0; i < width; i += LANES) {
        const vector a = load_partial(x + i, width - i), d = load_partial(grad + i, width - i);
        store_partial(d_gain + i, load_partial(d_gain + i, width - i) + d * a * inverse, width - i);
        store_partial(d_x + i, (d * load_partial(gain + i, width - i) - a * coefficient) * inverse,
                      width - i);
    }
}

/* Rotate a head. `direction` is 1, or −1 for the backward pass. */
INLINE void rotate(int64_t size, const float *cosines, const float *sines, float direction,
                   const float *x, float *out)
{
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const vector first = load_partial(x + i, left), second = load_partial(x + half + i, left);
        const vector cosine = load_partial(cosines + i, left),
                     sine = direction * load_partial(sines + i, left);
        store_partial(out + i, first * cosine - second * sine, left);
        store_partial(out + half + i, second * cosine + first * sine, left);
    }
}

void qk_norm_rope(const struct qk *qk)
{
    const int64_t size = qk->size;
    const float *x = qk->x;
    float *out = qk->out, *inverse = qk->inverse;
    for (int64_t row = 0; row < qk->windows * qk->length; row++, x += qk->stride) {
        const int64_t angles = row % qk->length * size;
        for (int64_t h = 0; h < qk->heads; h++, out += size) {
            const float *from = x + h * size;
            if (qk->gain) {
                rms_norm(1, size, qk->epsilon, from, qk->gain, out, inverse++);
                from = out;
            }
            if (qk->cosines)
                rotate(size, qk->cosines + angles, qk->sines + angles, 1, from, out);
        }
    }
}

void qk_norm_rope_backward(const struct qk *qk)
{
    const int64_t size = qk->size;
    const float *x = qk->x, *grad = qk->grad, *inverse = qk->inverse;
    float *d_x = qk->d_x;
    for (int64_t row = 0; row < qk->windows * qk->length; row++, x += qk->stride, d_x += qk->stride) {
        const int64_t angles = row % qk->length * size;
        for (int64_t h = 0; h < qk->heads; h++, grad += size) {
            float *to = d_x + h * size;
            const float *from = grad;
            if (qk->cosines) {
                rotate(size, qk->cosines + angles, qk->sines + angles, -1, from, to);
                from = to;
            }
            if (qk->gain)
                rms_norm_row_backward(size, *inverse++, x + h * size, qk->gain, from, to, qk->d_gain);
        }
    }
}

void swiglu_and_slopes(int64_t rows, int64_t width, float *gate_up, float *out)
{
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i += LANES) {
            const vector gate = load_partial(gate_up + i, width - i);
            const vector up = load_partial(gate_up + width + i, width - i), sigma = sigmoid(gate);
            store_partial(out + i, gate * sigma * up, width - i);
            store_partial(gate_up + i, up * sigma * (1 + gate * (1 - sigma)), width - i);
            store_partial(gate_up + width + i, gate * sigma, width - i);
        }
}

/* Add the cross-entropy of logits (V, M), whose rows are `stride` apart, to `loss`, in nats, and
   overwrite the logits with their gradient times `scale`. Columns are tokens, computed in blocks of
   LOSS_BLOCK. */
#define LOSS_BLOCK 64

INLINE void cross_entropy_block(int64_t vocab_size, int64_t tokens, int64_t stride, float scale,
                                float *logits, const int64_t *targets, double *loss)
{
    vector largest[LOSS_BLOCK / LANES], sums[LOSS_BLOCK / LANES];
    for (int j = 0; j < LOSS_BLOCK / LANES; j++) {
        largest[j] = (vector){0} - INFINITY;
        sums[j] = (vector){0};
    }
    for (int64_t v = 0; v < vocab_size; v++)
        for (int64_t j = 0; j * LANES < tokens; j++) {
            const vector x = load_partial(logits + v * stride + j * LANES, tokens - j * LANES);
            const integers is_larger = x > largest[j];
            const vector exponential = vector_exp(blend(is_larger, largest[j] - x, x - largest[j]));
            sums[j] = blend(is_larger, sums[j] * exponential + 1, sums[j] + exponential);
            largest[j] = blend(is_larger, x, largest[j]);
        }
    for (int64_t t = 0; t < tokens; t++) {
        const float maximum = largest[t / LANES][t % LANES], sum = sums[t / LANES][t % LANES];
        const int64_t target = targets[t];
        if (target < 0) { /* ignored: no loss, and a gradient of scale / infinity */
            sums[t / LANES][t % LANES] = INFINITY;
            continue;
        }
        *loss += logf(sum) + (maximum - logits[target * stride + t]);
    }
    for (int j = 0; j < LOSS_BLOCK / LANES; j++)
        sums[j] = scale / sums[j];
    for (int64_t v = 0; v < vocab_size; v++)
        for (int64_t j = 0; j * LANES < tokens; j++) {
            float *target = logits + v * stride + j * LANES;
            const int64_t left = tokens - j * LANES;
            const vector x = load_partial(target, left);
            store_partial(target, vector_exp(x - largest[j]) * sums[j], left);
        }
    for (int64_t t = 0; t < tokens; t++)
        if (targets[t] >= 0)
            logits[targets[t] * stride + t] -= scale;
}

void cross_entropy(int64_t vocab_size, int64_t tokens, int64_t stride, float scale, float *logits,
                   const int64_t *targets, double *loss)
{
    for (int64_t t = 0; t < tokens; t += LOSS_BLOCK)
        cross_entropy_block(vocab_size, smaller(tokens - t, LOSS_BLOCK), stride, scale, logits + t,
                            targets + t, loss);
}
