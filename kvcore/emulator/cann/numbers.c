// SPDX-License-Identifier: Apache-2.0
// Element types: bits, values.  Every small float is decoded by its fields, and encoded by trying
// its neighbours in the table of all its values.  HiFloat8: Luo et al., arXiv 2409.16626.
#include "machine.h"

#include <math.h>
#include <string.h>

// 2: aclDataType; 5.3: four-bit types count elements, two a byte.
int kvd_bits(int dtype) {
    switch (dtype) {
    case UINT1: return 1;
    case INT4: case FLOAT4_E2M1: case FLOAT4_E1M2: return 4;
    case FLOAT6_E3M2: case FLOAT6_E2M3: return 6;
    case INT8: case UINT8: case BOOL: case HIFLOAT8: case FLOAT8_E5M2: case FLOAT8_E4M3FN:
    case FLOAT8_E8M0: return 8;
    case FLOAT16: case BF16: case INT16: case UINT16: return 16;
    case FLOAT32: case INT32: case UINT32: case COMPLEX32: return 32;
    case INT64: case UINT64: case DOUBLE: case COMPLEX64: return 64;
    case COMPLEX128: return 128;
    default: return 0;
    }
}

bool kvd_is_float(int dtype) {
    return dtype == FLOAT32 || dtype == FLOAT16 || dtype == BF16 || dtype == HIFLOAT8 ||
           dtype == FLOAT8_E5M2 || dtype == FLOAT8_E4M3FN;
}

struct format { int exponent, mantissa, bias; bool infinite; };

static struct format format_of(int dtype) {
    switch (dtype) {
    case FLOAT16: return (struct format){5, 10, 15, true};
    case BF16: return (struct format){8, 7, 127, true};
    case FLOAT8_E5M2: return (struct format){5, 2, 15, true};
    default: return (struct format){4, 3, 7, false};  // FLOAT8_E4M3FN
    }
}

// The non-negative value of code (no sign bit); NAN and INFINITY where the type has them.
static double value(unsigned code, int dtype) {
    if (dtype == HIFLOAT8) {
        if (code == 0x6F) return INFINITY;
        if (code == 0) return 0;
        if (code < 8) return ldexp(1, (int)code - 23);
        int dot, width;  // the prefix says how wide the exponent is
        if (code & 0x40) dot = 2, width = code & 0x20 ? 4 : 3;
        else if (code & 0x20) dot = 2, width = 2;
        else if (code & 0x10) dot = 3, width = 1;
        else dot = 4, width = 0;
        int rest = 7 - dot - width, exponent = 0;
        int field = (int)(code >> rest) & ((1 << width) - 1);
        if (width) {
            exponent = 1 << (width - 1) | (field & ((1 << (width - 1)) - 1));
            if (field >> (width - 1)) exponent = -exponent;
        }
        return ldexp(1 + (double)(code & ((1u << rest) - 1)) / (1 << rest), exponent);
    }
    struct format f = format_of(dtype);
    unsigned mantissa = code & ((1u << f.mantissa) - 1), top = (1u << f.exponent) - 1;
    unsigned exponent = code >> f.mantissa;
    if (f.infinite && exponent == top) return mantissa ? NAN : INFINITY;
    if (!f.infinite && code == 0x7F) return NAN;
    if (!exponent) return ldexp(mantissa, 1 - f.bias - f.mantissa);
    return ldexp((1u << f.mantissa) + mantissa, (int)exponent - f.bias - f.mantissa);
}

static unsigned load(const unsigned char *bytes, int dtype) {
    if (kvd_bits(dtype) == 8) return bytes[0];
    uint16_t code;
    memcpy(&code, bytes, 2);
    return code;
}

float kvd_decode(const unsigned char *bytes, int dtype) {
    if (dtype == FLOAT32) {
        float f;
        memcpy(&f, bytes, 4);
        return f;
    }
    unsigned code = load(bytes, dtype), sign = 1u << (kvd_bits(dtype) - 1);
    if (dtype == HIFLOAT8 && code == 0x80) return NAN;
    double v = value(code & (sign - 1), dtype);
    return (float)(code & sign ? -v : v);
}

void kvd_encode(float number, unsigned char *bytes, int dtype) {
    if (dtype == FLOAT32) {
        memcpy(bytes, &number, 4);
        return;
    }
    unsigned sign = 1u << (kvd_bits(dtype) - 1), best = 0;
    double magnitude = fabs((double)number);
    if (isnan(number)) best = dtype == HIFLOAT8 ? 0x80 : dtype == FLOAT8_E4M3FN ? 0x7F : sign - 1;
    else if (dtype == HIFLOAT8) {
        // nearest, ties away; 49152 is where the number after the greatest would be
        double distance = INFINITY, chosen = -1;
        for (unsigned code = 0; code < 128; code++) {
            double v = code == 0x6F ? 49152 : value(code, dtype), d = fabs(v - magnitude);
            if (isinf(magnitude)) d = code == 0x6F ? 0 : 1;
            if (d < distance || (d == distance && v > chosen)) best = code, distance = d, chosen = v;
        }
        if (magnitude > 49152) best = 0x6F;
        if (signbit(number) && best) best |= sign;
    } else {
        // the codes ascend: the greatest not above, then it or its neighbour, ties to even
        struct format f = format_of(dtype);
        unsigned low = 0, high = f.infinite ? ((1u << f.exponent) - 1) << f.mantissa : 0x7F;
        unsigned end = high;
        while (high - low > 1) {
            unsigned middle = (low + high) / 2;
            if (value(middle, dtype) <= magnitude) low = middle;
            else high = middle;
        }
        double below = value(low, dtype);
        double above = low + 1 == end ? 2 * below - value(low - 1, dtype) : value(low + 1, dtype);
        best = low;
        if (isinf(magnitude) || magnitude - below > above - magnitude ||
            (magnitude - below == above - magnitude && low % 2))
            best = low + 1;
        if (signbit(number)) best |= sign;
    }
    if (sign == 0x80) bytes[0] = (unsigned char)best;
    else {
        uint16_t code = (uint16_t)best;
        memcpy(bytes, &code, 2);
    }
}
