/* Loads and stores of less than a vector, and the functions of pointwise.c that block.c calls. */

/* Return the first `count` of LANES numbers, then zeros. */
INLINE vector load_partial(const float *x, int64_t count)
{
    vector result = {0};
    if (count >= LANES)
        return load(x);
    memcpy(&result, x, count * sizeof(float));
    return result;
}

INLINE void store_partial(float *x, vector values, int64_t count)
{
    if (count >= LANES)
        *(vector *)x = values;
    else
        memcpy(x, &values, count * sizeof(float));
}

/* Activations. They overwrite their input with the derivatives that the backward pass needs. */
void gelu_and_slope(int64_t count, float *x, float *out);
void swiglu_and_slopes(int64_t rows, int64_t width, float *gate_up, float *out);

void rms_norm(int64_t rows, int64_t width, float epsilon, const float *x, const float *gain, float *out,
              float *inverse);
void qk_norm_rope(int64_t windows, int64_t length, int64_t heads, int64_t size, int64_t stride,
                  float epsilon, const float *x, const float *gain, const float *cosines,
                  const float *sines, float *out, float *inverse);
void qk_norm_rope_backward(int64_t windows, int64_t length, int64_t heads, int64_t size, int64_t stride,
                           const float *inverse, const float *x, const float *gain, const float *cosines,
                           const float *sines, const float *grad, float *d_x, float *d_gain);
