/* Operations in one pass over memory, forward and backward, for one thread. Their reference
   implementations are in model/ops. Rows are contiguous; `grad` and `d_` name gradients as there. */

#include "vectors.h"

#include "pointwise.h"

/* GELU with tanh: x · σ(2 √(2/π) (x + 0.044715 x³)). Beyond ±16, σ is 0 or 1. */
#define LINEAR 1.5957691216f
#define CUBIC 0.0713548162726f

INLINE vector within(vector x)
{
    x = either(x > 16, (vector){0} + 16, x);
    return either(x < -16, (vector){0} - 16, x);
}

void gelu(int64_t rows, int64_t width, const float *x, float *out)
{
    const int64_t count = rows * width;
    for (int64_t i = 0; i < count; i += LANES) {
        const vector a = some_of(x + i, count - i), b = within(a);
        store_some(out + i, a * sigmoid(b * (LINEAR + CUBIC * b * b)), count - i);
    }
}

void gelu_backward(int64_t rows, int64_t width, const float *x, const float *grad, float *d_x)
{
    const int64_t count = rows * width;
    for (int64_t i = 0; i < count; i += LANES) {
        const vector a = within(some_of(x + i, count - i));
        const vector share = sigmoid(a * (LINEAR + CUBIC * a * a));
        const vector slope = share * (1 + a * (1 - share) * (LINEAR + 3 * CUBIC * a * a));
        store_some(d_x + i, slope * some_of(grad + i, count - i), count - i);
    }
}

void gelu_and_slope(int64_t count, float *x, float *out)
{
    for (int64_t i = 0; i < count; i += LANES) {
        const vector a = some_of(x + i, count - i), b = within(a);
        const vector share = sigmoid(b * (LINEAR + CUBIC * b * b));
        store_some(out + i, a * share, count - i);
        store_some(x + i, share * (1 + b * (1 - share) * (LINEAR + 3 * CUBIC * b * b)), count - i);
    }
}

/* x / √(mean x² + ε) · gain for each row; `inverse` gets 1 / √(mean x² + ε). */
INLINE float inverse_rms(int64_t width, const float *x, float epsilon)
{
    vector squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const vector a = some_of(x + i, width - i);
        squares += a * a;
    }
    return 1 / sqrtf(total(squares) / width + epsilon);
}

void rms_norm(int64_t rows, int64_t width, float epsilon, const float *x, const float *gain,
              float *out, float *inverse)
{
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        inverse[r] = inverse_rms(width, x, epsilon);
        for (int64_t i = 0; i < width; i += LANES)
            store_some(out + i, some_of(x + i, width - i) * inverse[r] * some_of(gain + i, width - i),
                       width - i);
    }
}

/* Write d_x, and add to d_gain. */
INLINE void rms_norm_row_backward(int64_t width, float inverse, const float *x, const float *gain,
                                  const float *grad, float *d_x, float *d_gain)
{
    vector along = {0};
    for (int64_t i = 0; i < width; i += LANES)
        along += some_of(grad + i, width - i) * some_of(gain + i, width - i)
                 * some_of(x + i, width - i);
    const float share = total(along) / width * inverse * inverse;
    for (int64_t i = 0; i < width; i += LANES) {
        const vector a = some_of(x + i, width - i), d = some_of(grad + i, width - i);
        store_some(d_gain + i, some_of(d_gain + i, width - i) + d * a * inverse, width - i);
        store_some(d_x + i, (d * some_of(gain + i, width - i) - a * share) * inverse, width - i);
    }
}

void rms_norm_backward(int64_t rows, int64_t width, const float *inverse, const float *x,
                       const float *gain, const float *grad, float *d_x, float *d_gain)
{
    for (int64_t r = 0; r < rows; r++, x += width, grad += width, d_x += width)
        rms_norm_row_backward(width, inverse[r], x, gain, grad, d_x, d_gain);
}

/* Heads (B, T, H, D) from rows that are `stride` apart: normalised if `gain` is not NULL, and rotated
   by the angles of their positions, (T, D), if `cosines` is not NULL. */
INLINE void turn(int64_t size, const float *cosines, const float *sines, float way,
                 const float *x, float *out)
{
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const vector first = some_of(x + i, left), second = some_of(x + half + i, left);
        const vector cosine = some_of(cosines + i, left), sine = way * some_of(sines + i, left);
        store_some(out + i, first * cosine - second * sine, left);
        store_some(out + half + i, second * cosine + first * sine, left);
    }
}

void place_heads(int64_t windows, int64_t length, int64_t heads, int64_t size, int64_t stride,
                 float epsilon, const float *x, const float *gain, const float *cosines,
                 const float *sines, float *out, float *inverse)
{
    for (int64_t row = 0; row < windows * length; row++, x += stride) {
        const int64_t at = row % length * size;
        for (int64_t h = 0; h < heads; h++, out += size) {
            const float *from = x + h * size;
            if (gain) {
                rms_norm(1, size, epsilon, from, gain, out, inverse++);
                from = out;
            }
            if (cosines)
                turn(size, cosines + at, sines + at, 1, from, out);
        }
    }
}

void place_heads_backward(int64_t windows, int64_t length, int64_t heads, int64_t size,
                          int64_t stride, const float *inverse, const float *x, const float *gain,
                          const float *cosines, const float *sines, const float *grad, float *d_x,
                          float *d_gain)
{
    for (int64_t row = 0; row < windows * length; row++, x += stride, d_x += stride) {
        const int64_t at = row % length * size;
        for (int64_t h = 0; h < heads; h++, grad += size) {
            float *to = d_x + h * size;
            const float *from = grad;
            if (cosines) {
                turn(size, cosines + at, sines + at, -1, from, to);
                from = to;
            }
            if (gain)
                rms_norm_row_backward(size, *inverse++, x + h * size, gain, from, to, d_gain);
        }
    }
}

/* Rows (gate, up) → silu(gate) · up. */
void swiglu(int64_t rows, int64_t width, const float *gate_up, float *out)
{
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i += LANES) {
            const vector gate = some_of(gate_up + i, width - i);
            const vector up = some_of(gate_up + width + i, width - i);
            store_some(out + i, gate * sigmoid(gate) * up, width - i);
        }
}

void swiglu_backward(int64_t rows, int64_t width, const float *gate_up, const float *grad,
                     float *d_gate_up)
{
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * width, grad += width, d_gate_up += 2 * width)
        for (int64_t i = 0; i < width; i += LANES) {
            const vector gate = some_of(gate_up + i, width - i);
            const vector up = some_of(gate_up + width + i, width - i);
            const vector d = some_of(grad + i, width - i), share = sigmoid(gate);
            const vector slope = share * (1 + gate * (1 - share));
            store_some(d_gate_up + i, d * up * slope, width - i);
            store_some(d_gate_up + width + i, d * gate * share, width - i);
        }
}

void swiglu_and_slopes(int64_t rows, int64_t width, float *gate_up, float *out)
{
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * width, out += width)
        for (int64_t i = 0; i < width; i += LANES) {
            const vector gate = some_of(gate_up + i, width - i);
            const vector up = some_of(gate_up + width + i, width - i), share = sigmoid(gate);
            store_some(out + i, gate * share * up, width - i);
            store_some(gate_up + i, up * share * (1 + gate * (1 - share)), width - i);
            store_some(gate_up + width + i, gate * share, width - i);
        }
}

/* Add the cross-entropy of logits (V, M), whose rows are `stride` apart, plus a bias (V) or NULL, to
   `loss`, in nats. If `scale` is not 0, replace the logits by their gradient times `scale`, and add it
   to `d_bias` unless that is NULL. Columns are tokens, BLOCK of them at a time. */
#define BLOCK 64

INLINE void of_some_tokens(int64_t vocab_size, int64_t tokens, int64_t stride, float scale,
                           const float *bias, float *logits, const int64_t *targets, double *loss,
                           float *d_bias)
{
    vector largest[BLOCK / LANES], sums[BLOCK / LANES];
    for (int j = 0; j < BLOCK / LANES; j++) {
        largest[j] = (vector){0} - INFINITY;
        sums[j] = (vector){0};
    }
    for (int64_t v = 0; v < vocab_size; v++)
        for (int64_t j = 0; j * LANES < tokens; j++) {
            const vector x = some_of(logits + v * stride + j * LANES, tokens - j * LANES)
                             + (bias ? bias[v] : 0);
            const integers more = x > largest[j];
            const vector e = exp_of(either(more, largest[j] - x, x - largest[j]));
            sums[j] = either(more, sums[j] * e + 1, sums[j] + e);
            largest[j] = either(more, x, largest[j]);
        }
    for (int64_t t = 0; t < tokens; t++) {
        const float top = largest[t / LANES][t % LANES], sum = sums[t / LANES][t % LANES];
        const int64_t target = targets[t];
        *loss += logf(sum) + (top - (logits[target * stride + t] + (bias ? bias[target] : 0)));
    }
    if (!scale)
        return;
    for (int j = 0; j < BLOCK / LANES; j++)
        sums[j] = scale / sums[j];
    for (int64_t v = 0; v < vocab_size; v++) {
        vector along = {0};
        for (int64_t j = 0; j * LANES < tokens; j++) {
            float *place = logits + v * stride + j * LANES;
            const int64_t left = tokens - j * LANES;
            const vector x = some_of(place, left) + (bias ? bias[v] : 0);
            const vector d = exp_of(x - largest[j]) * sums[j];
            store_some(place, d, left);
            along += left < LANES ? some_of(place, left) : d;
        }
        if (d_bias)
            d_bias[v] += total(along);
    }
    for (int64_t t = 0; t < tokens; t++) {
        logits[targets[t] * stride + t] -= scale;
        if (d_bias)
            d_bias[targets[t]] -= scale;
    }
}

void cross_entropy(int64_t vocab_size, int64_t tokens, int64_t stride, float scale,
                   const float *bias, float *logits, const int64_t *targets, double *loss,
                   float *d_bias)
{
    for (int64_t t = 0; t < tokens; t += BLOCK)
        of_some_tokens(vocab_size, tokens - t < BLOCK ? tokens - t : BLOCK, stride, scale, bias,
                       logits + t, targets + t, loss, d_bias);
}
