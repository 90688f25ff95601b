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
/* Queries or keys (B, T, H, D), in rows that are `stride` apart. They get an RMS norm if `gain` is not NULL,
   and then the rotation of their positions if `cosines` is not NULL. */
struct qk {
    int64_t windows, length, heads, size, stride;
    float epsilon;
    const float *x, *gain;         /* (B, T, stride), (D) */
    const float *cosines, *sines; /* (T, D) */
    float *inverse;               /* 1 / √(mean x² + ε), (B, T, H) */
    float *out;                   /* of the forward pass, (B, T, H, D) */
    const float *grad;            /* of the backward pass: the gradient of `out` */
    float *d_x, *d_gain;          /* (B, T, stride), (D): overwritten, and added to */
};

void qk_norm_rope(const struct qk *qk);
void qk_norm_rope_backward(const struct qk *qk);
