// 16-bit floating point, as the device converts it.
#include "emulation.h"

namespace emulation {

float f16_to_float(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

u16 float_to_f16(float x) {
    u32 bits = bits_of(x);
    u16 sign = bits >> 16 & 0x8000;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;
    if (magnitude < 0x38800000u) {
        // Below the smallest normal number: in units of 2^-24, to nearest even by the processor's addition.
        float scaled = float_of(magnitude) * 0x1p24f;
        float rounded = (scaled + 0x1p23f) - 0x1p23f;
        return sign | (u16)rounded;
    }
    return sign | (u16)((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

} // namespace emulation
