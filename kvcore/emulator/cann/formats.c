// SPDX-License-Identifier: Apache-2.0
// Tensor formats: where an element of a tensor lies in memory that is not row by row, and casts
// between formats: the operator TransData, and aclnnNpuFormatCast (op-plugin's newer way).
// The storage's dims are the sizes of its pieces; elements there that are not the tensor's are zero.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

enum { NC1HWC0 = 3, FRACTAL_Z = 4, NDC1HWC0 = 32, FRACTAL_Z_3D = 33 };

static bool plain(int format) {
    return format == FORMAT_ND || format == 0 || format == 1 || format == 47 || format == 30 ||
           format == 27 || format == 16 || format == -1;
}

static int64_t row_by_row(const int64_t *dims, int rank, const int64_t *index) {
    int64_t at = 0;
    for (int i = 0; i < rank; i++) at = at * dims[i] + index[i];
    return at;
}

// The element's place in the storage; -1 for a format that is not handled here.
static int64_t place(const struct layout *l, const int64_t *index) {
    const int64_t *s = l->storage;
    int r = l->rank, q = l->storage_rank;
    if (plain(l->format)) return row_by_row(l->dims, r, index);
    if (l->format == FORMAT_FRACTAL_NZ && r >= 2 && q == r + 2) {
        int64_t outer = row_by_row(l->dims, r - 2, index), m = index[r - 2], n = index[r - 1];
        int64_t m0 = s[q - 2], n0 = s[q - 1];
        outer = (outer * s[q - 4] + n / n0) * s[q - 3] + m / m0;
        return (outer * m0 + m % m0) * n0 + n % n0;
    }
    if (l->format == NC1HWC0 && r == 4 && q == 5) {
        int64_t c0 = s[4], at = index[0] * s[1] + index[1] / c0;
        return ((at * s[2] + index[2]) * s[3] + index[3]) * c0 + index[1] % c0;
    }
    if (l->format == FRACTAL_Z && r == 4 && q == 4) {
        int64_t n0 = s[2], c0 = s[3];
        int64_t at = (index[1] / c0 * l->dims[2] + index[2]) * l->dims[3] + index[3];
        return ((at * s[1] + index[0] / n0) * n0 + index[0] % n0) * c0 + index[1] % c0;
    }
    if (l->format == NDC1HWC0 && r == 5 && q == 6) {  // of N, C, D, H, W
        int64_t c0 = s[5], at = (index[0] * s[1] + index[2]) * s[2] + index[1] / c0;
        return ((at * s[3] + index[3]) * s[4] + index[4]) * c0 + index[1] % c0;
    }
    if (l->format == FRACTAL_Z_3D && r == 5 && q == 4) {
        int64_t n0 = s[2], c0 = s[3], c1 = (l->dims[1] + c0 - 1) / c0;
        int64_t at = (index[2] * c1 + index[1] / c0) * l->dims[3] + index[3];
        at = at * l->dims[4] + index[4];
        return ((at * s[1] + index[0] / n0) * n0 + index[0] % n0) * c0 + index[1] % c0;
    }
    return -1;
}

size_t kvdouble_num_formats;  // casts to formats that are not plain, for Python to look at

bool kvd_known_layout(const struct layout *l) {
    static const int64_t zeros[MAX_RANK];
    return place(l, zeros) >= 0;
}

void kvd_note_format(const struct layout *l) { kvdouble_num_formats += !plain(l->format); }

int64_t kvd_layout_elements(const struct layout *l) {
    int64_t n = 1;
    bool flat = plain(l->format);
    for (int i = 0; i < (flat ? l->rank : l->storage_rank); i++)
        n *= flat ? l->dims[i] : l->storage[i];
    return n;
}

void kvd_transfer(const struct layout *to, unsigned char *dst, const struct layout *from,
                  const unsigned char *src, size_t item) {
    int64_t index[MAX_RANK] = {0};
    if (!plain(to->format)) memset(dst, 0, (size_t)kvd_layout_elements(to) * item);
    for (int i = 0; i < from->rank; i++)
        if (!from->dims[i]) return;
    for (;;) {
        memcpy(dst + (size_t)place(to, index) * item, src + (size_t)place(from, index) * item, item);
        int axis = from->rank - 1;
        while (axis >= 0 && ++index[axis] == from->dims[axis]) index[axis--] = 0;
        if (axis < 0) return;
    }
}

// The storage of a tensor of these dims in a format, as torch_npu sizes it; false: not handled here.
bool kvd_storage_of(struct layout *l, int format, size_t item) {
    int r = l->rank;
    int64_t wide = item == 1 ? 32 : 16;
    l->format = format;
    if (plain(format)) {
        l->storage_rank = r;
        memcpy(l->storage, l->dims, sizeof l->dims);
        return true;
    }
    if (format != FORMAT_FRACTAL_NZ || r < 2 || r + 2 > MAX_RANK) return false;
    l->storage_rank = r + 2;
    memcpy(l->storage, l->dims, sizeof l->dims);
    l->storage[r - 2] = (l->dims[r - 1] + wide - 1) / wide;
    l->storage[r - 1] = (l->dims[r - 2] + 15) / 16;
    l->storage[r] = 16;
    l->storage[r + 1] = wide;
    return true;
}
