/* Logits of the next token, one call for all that a model computes. decoding_numpy.py says the same
   in NumPy, whose calls cost more than the work in them where a model is small; tests hold the two
   equal. decoding_native.py lays the weights out for this.

   Axes: B windows, S tokens of a window, T new ones among them, C embed_dim, H heads, D head size,
   V vocabulary. */

#include "vectors.h"

#if LANES == 16
#define TILE 8 /* rows */
#define WIDE 4 /* panels */
#elif LANES == 8
#define TILE 3
#define WIDE 2
#else
#define TILE 2
#define WIDE 1
#endif
#define PANEL 32
#define PARTS (PANEL / LANES)
#define ROWS 64 /* tokens that go through all layers together */
#define EPSILON 1e-6f

/* A matrix (outputs × inputs) comes as panels: 32 outputs side by side for the first input, then
   for the second, and so on; outputs are filled up with zeros to whole panels. A row of numbers
   that a product writes is therefore a multiple of 32 long. */

static int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* A few rows of x times a few panels: both numbers are constant where this is expanded, so that the
   sums stay in registers. */
INLINE void tile(const int rows, const int panels, int64_t inputs, const float *x, int64_t x_stride,
     const float *matrix, float *y, int64_t y_stride, int add)
{
    vector sums[rows][panels * PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels * PARTS; p++)
            sums[r][p] = add ? load(y + r * y_stride + p * LANES) : (vector){0};
    for (int64_t i = 0; i < inputs; i++)
        for (int p = 0; p < panels * PARTS; p++) {
            const float *panel = matrix + p / PARTS * inputs * PANEL;
            vector weights = load(panel + i * PANEL + p % PARTS * LANES);
            for (int r = 0; r < rows; r++)
                sums[r][p] += x[r * x_stride + i] * weights;
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels * PARTS; p++)
            *(vector *)(y + r * y_stride + p * LANES) = sums[r][p];
}

/* y = x · matrixᵀ, or y += it. */
static void product(int64_t rows, int64_t inputs, int64_t outputs, const float *x,
                    int64_t x_stride, const float *matrix, float *y, int64_t y_stride, int add)
{
#define PRODUCT(rows, panels) \
    tile(rows, panels, inputs, x + r * x_stride, x_stride, matrix + o * inputs, \
         y + r * y_stride + o, y_stride, add)
    outputs = padded(outputs);
    for (int64_t o = 0, r = 0; o < outputs; o += PANEL, r = 0) {
        if (rows == 1 && o + WIDE * PANEL <= outputs) {
            PRODUCT(1, WIDE); /* one row alone has too few sums to keep the processor busy */
            o += (WIDE - 1) * PANEL;
            continue;
        }
        for (; r + TILE <= rows; r += TILE)
            PRODUCT(TILE, 1);
        for (; TILE > 4 && r + 4 <= rows; r += 4)
            PRODUCT(4, 1);
        for (; r + 2 <= rows; r += 2)
            PRODUCT(2, 1);
        if (r < rows)
            PRODUCT(1, 1);
    }
#undef PRODUCT
}

static float inverse_rms(int64_t size, const float *x)
{
    float sums[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++)
            sums[j] += x[i + j] * x[i + j];
    for (; i < size; i++)
        sum += x[i] * x[i];
    for (int j = 0; j < 16; j++)
        sum += sums[j];
    return 1.0f / sqrtf(sum / size + EPSILON);
}

static void normalise(int64_t rows, int64_t size, int64_t stride, const float *x, float *y)
{
    for (int64_t r = 0; r < rows; r++, x += stride, y += stride) {
        float scale = inverse_rms(size, x);
        for (int64_t i = 0; i < size; i++)
            y[i] = x[i] * scale;
    }
}

/* A head's query or key, normalised and turned to its position: the halves hold the pairs. */
static void turn(int64_t size, const float *x, const float *gain, const float *cosines,
                 const float *sines, float *y)
{
    float scale = inverse_rms(size, x);
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i] * scale * gain[i], second = x[half + i] * scale * gain[half + i];
        y[i] = first * cosines[i] - second * sines[i];
        y[half + i] = second * cosines[i] + first * sines[i];
    }
}

/* What a query gathers from the first `visible` tokens: softmax(keysᵀ query) · values. */
static void gather(int64_t size, int64_t visible, int64_t capacity, const float *query,
                   const float *keys, const float *values, float *scores, float *mixed)
{
    for (int64_t s = 0; s < visible; s++)
        scores[s] = query[0] * keys[s];
    for (int64_t i = 1; i < size; i++)
        for (int64_t s = 0; s < visible; s++)
            scores[s] += query[i] * keys[i * capacity + s];
    float largest = scores[0];
    for (int64_t s = 1; s < visible; s++)
        largest = scores[s] > largest ? scores[s] : largest;
    for (int64_t s = 0; s < visible; s += LANES) /* there is room for whole vectors */
        *(vector *)(scores + s) = exp_of(load(scores + s) - largest);
    float sum = 0;
    memset(mixed, 0, size * sizeof(float));
    for (int64_t s = 0; s < visible; s++) {
        sum += scores[s];
        for (int64_t i = 0; i < size; i++)
            mixed[i] += scores[s] * values[s * size + i];
    }
    for (int64_t i = 0; i < size; i++)
        mixed[i] /= sum;
}

struct one_layer {
    int64_t heads, size, vocab_size;
    /* A token's and a position's part: queries (N, H·D), keys beside values (N, 2·H·D). */
    const float *token_queries, *position_queries, *token_keys_values, *position_keys_values;
    const float *head, *bias; /* panels, (V) filled up with zeros */
    float *scratch;
};

int64_t one_layer_scratch(const struct one_layer *m, int64_t block_size)
{
    return (m->heads + 1) * m->size + (2 * m->size + 1) * block_size + LANES;
}

/* Logits (B, V) after windows of `length` tokens: ids (B, S). */
void one_layer_logits(const struct one_layer *m, int64_t samples, int64_t length,
                      const int64_t *ids, float *logits)
{
    const int64_t size = m->size, all = m->heads * size, outputs = padded(m->vocab_size);
    float *query = m->scratch, *mixed = query + size, *keys = mixed + all;
    float *values = keys + size * length, *scores = values + size * length;
    for (; samples--; ids += length, logits += outputs) {
        for (int64_t h = 0; h < m->heads; h++) {
            const float *token = m->token_queries + ids[length - 1] * all + h * size;
            const float *position = m->position_queries + (length - 1) * all + h * size;
            for (int64_t i = 0; i < size; i++)
                query[i] = token[i] + position[i];
            for (int64_t s = 0; s < length; s++) {
                token = m->token_keys_values + ids[s] * 2 * all + h * size;
                position = m->position_keys_values + s * 2 * all + h * size;
                for (int64_t i = 0; i < size; i++)
                    keys[i * length + s] = token[i] + position[i];
                for (int64_t i = 0; i < size; i++)
                    values[s * size + i] = token[all + i] + position[all + i];
            }
            gather(size, length, length, query, keys, values, scores, mixed + h * size);
        }
        memcpy(logits, m->bias, outputs * sizeof(float));
        product(1, all, m->vocab_size, mixed, all, m->head, logits, outputs, 1);
    }
}

struct block {
    const float *qkv, *gains, *projection, *gate_up, *down; /* gains (2, D): queries', keys' */
    float *keys, *values; /* (B, H, D, S) and (B, H, S, D): S is block_size */
};

struct transformer {
    int64_t layers, width, heads, size, hidden, block_size, vocab_size;
    const float *embedding, *head, *cosines, *sines; /* (V, C), panels, (S, D/2) twice */
    const struct block *blocks;
    float *scratch;
};

int64_t transformer_scratch(const struct transformer *m)
{
    int64_t all = m->heads * m->size;
    return ROWS * (2 * padded(m->width) + padded(3 * all) + all + padded(2 * m->hidden))
        + m->block_size + 2 * LANES;
}

/* Logits (B, V) after the last of `count` new tokens in each of B windows, of which `known` tokens
   are remembered: ids (B, count). Its rows are the new tokens one after the other. */
void transformer_logits(const struct transformer *m, int64_t samples, int64_t count,
                        int64_t known, const int64_t *ids, float *logits)
{
    const int64_t size = m->size, all = m->heads * size, half = size / 2;
    const int64_t stride = padded(m->width), qkv_stride = padded(3 * all);
    const int64_t hidden_stride = padded(2 * m->hidden), last = m->layers - 1;
    float *x = m->scratch, *read = x + ROWS * stride, *packed = read + ROWS * stride;
    float *mixed = packed + ROWS * qkv_stride, *hidden = mixed + ROWS * all;
    float *scores = hidden + ROWS * hidden_stride;

    for (int64_t begin = 0; begin < samples * count; begin += ROWS) {
        int64_t rows = samples * count - begin < ROWS ? samples * count - begin : ROWS;
        for (int64_t r = 0; r < rows; r++) {
            memcpy(x + r * stride, m->embedding + ids[begin + r] * m->width,
                   m->width * sizeof(float));
            memset(x + r * stride + m->width, 0, (stride - m->width) * sizeof(float));
        }
        for (int64_t layer = 0; layer < m->layers; layer++) {
            const struct block *b = m->blocks + layer;
            normalise(rows, m->width, stride, x, read);
            product(rows, m->width, 3 * all, read, stride, b->qkv, packed, qkv_stride, 0);
            int64_t kept = 0; /* of the last layer only the windows' last tokens are wanted */
            for (int64_t r = 0; r < rows; r++) {
                int64_t sample = (begin + r) / count, position = known + (begin + r) % count;
                float *row = packed + r * qkv_stride, turned[size];
                const float *cosines = m->cosines + position * half;
                const float *sines = m->sines + position * half;
                int wanted = layer < last || position == known + count - 1;
                for (int64_t h = 0; h < m->heads; h++) {
                    int64_t place = (sample * m->heads + h) * size * m->block_size;
                    float *keys = b->keys + place, *values = b->values + place;
                    turn(size, row + all + h * size, b->gains + size, cosines, sines, turned);
                    for (int64_t i = 0; i < size; i++)
                        keys[i * m->block_size + position] = turned[i];
                    memcpy(values + position * size, row + 2 * all + h * size,
                           size * sizeof(float));
                    if (!wanted)
                        continue;
                    turn(size, row + h * size, b->gains, cosines, sines, turned);
                    gather(size, position + 1, m->block_size, turned, keys, values, scores,
                           mixed + kept * all + h * size);
                }
                if (wanted && kept++ < r)
                    memcpy(x + (kept - 1) * stride, x + r * stride, stride * sizeof(float));
            }
            if (layer == last)
                rows = kept;
            product(rows, all, m->width, mixed, all, b->projection, x, stride, 1);
            normalise(rows, m->width, stride, x, read);
            product(rows, m->width, 2 * m->hidden, read, stride, b->gate_up, hidden,
                    hidden_stride, 0);
            for (int64_t r = 0; r < rows; r++) {
                float *gate = hidden + r * hidden_stride, *up = gate + m->hidden;
                for (int64_t i = 0; i < m->hidden; i += LANES) {
                    int64_t left = m->hidden - i < LANES ? m->hidden - i : LANES;
                    vector x = load(gate + i), e = exp_of(either(x < 0, x, -x));
                    vector y = x * load(up + i) * either(x < 0, e, (vector){0} + 1) / (1 + e);
                    memcpy(gate + i, &y, left * sizeof(float)); /* SwiGLU, without overflow */
                }
            }
            product(rows, m->hidden, m->width, hidden, hidden_stride, b->down, x, stride, 1);
        }
        normalise(rows, m->width, stride, x, read);
        product(rows, m->width, m->vocab_size, read, stride, m->head, logits,
                padded(m->vocab_size), 0);
        logits += rows * padded(m->vocab_size);
    }
}

