/* The first or last numbers of an array as a vector, and the functions of pointwise.c that block.c calls. */

INLINE vector some_of(const float *x, int64_t count)
{
    vector part = {0};
    if (count >= LANES)
        return load(x);
    memcpy(&part, x, count * sizeof(float));
    return part;
}

INLINE void store_some(float *x, vector values, int64_t count)
{
    if (count >= LANES)
        *(vector *)x = values;
    else
        memcpy(x, &values, count * sizeof(float));
}

/* Activations that replace their input by the slopes that the backward pass needs. */
void gelu_and_slope(int64_t count, float *x, float *out);
void swiglu_and_slopes(int64_t rows, int64_t width, float *gate_up, float *out);

void rms_norm(int64_t rows, int64_t width, float epsilon, const float *x, const float *gain, float *out,
              float *inverse);
void place_heads(int64_t windows, int64_t length, int64_t heads, int64_t size, int64_t stride,
                 float epsilon, const float *x, const float *gain, const float *cosines,
                 const float *sines, float *out, float *inverse);
void place_heads_backward(int64_t windows, int64_t length, int64_t heads, int64_t size, int64_t stride,
                          const float *inverse, const float *x, const float *gain, const float *cosines,
                          const float *sines, const float *grad, float *d_x, float *d_gain);
