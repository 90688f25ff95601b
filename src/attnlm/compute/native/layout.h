/* Sizes and offsets of structs. Python compares them with its own when it loads the library. */

#include <stddef.h>
#include <stdint.h>

struct layout {
    const char *name;     /* struct.field, or struct */
    int64_t offset, size; /* in bytes */
};

#define STRUCT(name) {#name, 0, sizeof(struct name)}
#define FIELD(of, field) {#of "." #field, offsetof(struct of, field), sizeof(((struct of *)0)->field)}

/* Norms and MLPs, numbered as in model/ops/block.py. */
enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { NO_MLP, SWIGLU, GELU, RELU2 };
