/* Matmuls of any sizes and layouts. The columns of the second matrix are copied to panels, whose rows
   are contiguous; the first matrix is read in place. The order of the sum of each element does not
   depend on the number of members (Goto and van de Geijn, 2008). */

#if LANES == 16
#define MATMUL_TILE_ROWS 12
#elif LANES == 8
#define MATMUL_TILE_ROWS 6
#else
#define MATMUL_TILE_ROWS 4
#endif
#define MATMUL_TILE_VECTORS 2 /* vectors of a panel */
#define MATMUL_PANEL (MATMUL_TILE_VECTORS * LANES)
#define MATMUL_DEPTH 256 /* rows of a panel at most */
#define MATMUL_COLUMNS 512 /* columns whose panels are in scratch memory together; whole panels */
#define MATMUL_ROWS (8 * MATMUL_TILE_ROWS)
#define MATMUL_SCRATCH (MATMUL_DEPTH * (MATMUL_COLUMNS + MATMUL_ROWS)) /* numbers for each member */

#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* Element (i, j) is data[i * row + j * column]; `row` or `column` is 1. */
struct matrix {
    const float *data;
    int64_t row, column;
};

/* Compute c (rows, P) = a (rows, depth) · panel (depth, P) + bias, or += with `add`; P is MATMUL_PANEL.
   `rows` is a constant at each call, so that the sums stay in registers. */
INLINE void matmul_tile(const int rows, int64_t depth, struct matrix a, const float *panel, float *c,
                        int64_t stride, const float *bias, int add)
{
    vector sums[MATMUL_TILE_ROWS][MATMUL_TILE_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < depth; k++, panel += MATMUL_PANEL) {
        const vector left = load(panel), right = load(panel + LANES);
        UNROLLED
        for (int r = 0; r < rows; r++) {
            sums[r][0] += a.data[r * a.row + k * a.column] * left;
            sums[r][1] += a.data[r * a.row + k * a.column] * right;
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int v = 0; v < MATMUL_TILE_VECTORS; v++) {
            vector *target = (vector *)(c + r * stride + v * LANES), sum = sums[r][v];
            if (add)
                sum += *target;
            else if (bias)
                sum += load(bias + v * LANES);
            *target = sum;
        }
}

/* Copy four columns (depth, 4) of a matrix, whose columns are contiguous, to a panel. */
static void fill_four(const float *columns, int64_t stride, int64_t depth, float *panel)
{
    const float *second = columns + stride, *third = second + stride, *fourth = third + stride;
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
        const vector4 a = *(vector4 *)(columns + k), b = *(vector4 *)(second + k);
        const vector4 c = *(vector4 *)(third + k), d = *(vector4 *)(fourth + k);
        for (int l = 0; l < 4; l++)
            *(vector4 *)(panel + (k + l) * MATMUL_PANEL) = (vector4){a[l], b[l], c[l], d[l]};
    }
    for (; k < depth; k++)
        for (int l = 0; l < 4; l++)
            panel[k * MATMUL_PANEL + l] = columns[l * stride + k];
}

/* Copy (depth, width) of b to a panel, padded with zeros. */
static void fill_panel(struct matrix b, int64_t depth, int64_t width, float *panel)
{
    int64_t j = 0;
    if (b.column == 1 && width == MATMUL_PANEL) {
        for (int64_t k = 0; k < depth; k++)
            for (int v = 0; v < MATMUL_PANEL; v += LANES)
                *(vector *)(panel + k * MATMUL_PANEL + v) = load(b.data + k * b.row + v);
        return;
    }
    if (b.row == 1)
        for (; j + 4 <= width; j += 4)
            fill_four(b.data + j * b.column, b.column, depth, panel + j);
    for (; j < MATMUL_PANEL; j++)
        for (int64_t k = 0; k < depth; k++)
            panel[k * MATMUL_PANEL + j] = j < width ? b.data[k * b.row + j * b.column] : 0;
}

/* Compute some rows of c from one panel. The last panel may have fewer columns, `width`. */
INLINE void multiply_panel(int64_t rows, int64_t depth, struct matrix a, const float *panel,
                           int64_t width, float *c, int64_t stride, const float *bias, int add)
{
    float edge[MATMUL_TILE_ROWS * MATMUL_PANEL], edge_bias[MATMUL_PANEL] = {0};
    if (width < MATMUL_PANEL && bias)
        bias = memcpy(edge_bias, bias, width * sizeof(float));
#define TILES(tile_rows) \
    for (; rows >= tile_rows; \
         rows -= tile_rows, a.data += tile_rows * a.row, c += tile_rows * stride) { \
        if (width == MATMUL_PANEL) { \
            matmul_tile(tile_rows, depth, a, panel, c, stride, bias, add); \
            continue; \
        } \
        if (add) \
            for (int r = 0; r < tile_rows; r++) \
                memcpy(edge + r * MATMUL_PANEL, c + r * stride, width * sizeof(float)); \
        matmul_tile(tile_rows, depth, a, panel, edge, MATMUL_PANEL, bias, add); \
        for (int r = 0; r < tile_rows; r++) \
            memcpy(c + r * stride, edge + r * MATMUL_PANEL, width * sizeof(float)); \
    }
    TILES(MATMUL_TILE_ROWS)
    TILES(2)
    TILES(1)
#undef TILES
}

/* Compute a member's range of c (rows, columns) = a (rows, depth) · b (depth, columns) + bias, or +=
   with `add` and without bias. Rows of c are `stride` apart. `bias` may be NULL. */
static void matmul(struct member self, int64_t rows, int64_t columns, int64_t depth, struct matrix a,
                   struct matrix b, float *c, int64_t stride, const float *bias, int add,
                   float *scratch)
{
    const int64_t panels = (columns + MATMUL_PANEL - 1) / MATMUL_PANEL;
    const int64_t tiles = (rows + MATMUL_TILE_ROWS - 1) / MATMUL_TILE_ROWS;
    struct range own_rows = {0, rows}, own = {0, columns};
    if (panels >= 2 * self.team->members || panels >= tiles) {
        own = own_range(self, panels);
        own.begin *= MATMUL_PANEL;
        own.end = smaller(own.end * MATMUL_PANEL, columns);
    } else {
        own_rows = own_range(self, tiles);
        own_rows.begin *= MATMUL_TILE_ROWS;
        own_rows.end = smaller(own_rows.end * MATMUL_TILE_ROWS, rows);
    }
    const int64_t blocks = (depth + MATMUL_DEPTH - 1) / MATMUL_DEPTH;
    const int64_t block = (depth + blocks - 1) / blocks;
    for (int64_t j = own.begin; j < own.end; j += MATMUL_COLUMNS)
        for (int64_t k = 0; k < depth; k += block) {
            const int64_t end = smaller(j + MATMUL_COLUMNS, own.end);
            const int64_t steps = smaller(depth - k, block);
            for (int64_t column = j; column < end; column += MATMUL_PANEL) {
                struct matrix source = {b.data + k * b.row + column * b.column, b.row, b.column};
                fill_panel(source, steps, smaller(end - column, MATMUL_PANEL),
                           scratch + (column - j) * MATMUL_DEPTH);
            }
            for (int64_t i = own_rows.begin; i < own_rows.end; i += MATMUL_ROWS) {
                const int64_t left = smaller(own_rows.end - i, MATMUL_ROWS);
                struct matrix source = {a.data + i * a.row + k * a.column, a.row, a.column};
                if (a.column != 1) {
                    float *copy = scratch + MATMUL_DEPTH * MATMUL_COLUMNS;
                    for (int64_t l = 0; l < steps; l++) {
                        const float *from = source.data + l * a.column;
                        float *to = copy + l * MATMUL_ROWS;
                        if (left == MATMUL_ROWS)
                            memcpy(to, from, MATMUL_ROWS * sizeof(float)); /* a constant is faster */
                        else
                            memcpy(to, from, left * sizeof(float));
                    }
                    source = (struct matrix){copy, 1, MATMUL_ROWS};
                }
                for (int64_t column = j; column < end; column += MATMUL_PANEL) {
                    const int64_t width = smaller(end - column, MATMUL_PANEL);
                    const float *panel = scratch + (column - j) * MATMUL_DEPTH;
                    const float *panel_bias = bias ? bias + column : NULL;
                    float *target = c + i * stride + column;
                    if (a.column == 1)
                        multiply_panel(left, steps, (struct matrix){source.data, a.row, 1}, panel,
                                       width, target, stride, panel_bias, add || k);
                    else
                        multiply_panel(left, steps, (struct matrix){source.data, 1, MATMUL_ROWS}, panel,
                                       width, target, stride, panel_bias, add || k);
                }
            }
        }
}
