// exp(a - max) of rows and its sum, for as many lanes as the machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "checks.h"

namespace metselect {

inline double exponential(double x) { return std::exp(x); }

// e^x for x <= 0, within two units in the last place: 2^k times a polynomial in the rest of x,
// |rest| <= ln 2 / 2. Below the smallest normal number it is 0.
inline __attribute__((always_inline)) float exponential(float x) {
  const float k = std::nearbyint(x * 1.44269504f);
  const float rest = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = (p * rest * rest + rest) + 1.0f;
  const int32_t bits = (static_cast<int32_t>(x < -87.0f ? 0.0f : k) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : p * power;
}

// Replaces each of `rows` rows of a by exp(a - top), top being its largest entry, or 0 if that is
// -inf; writes top and the sum of the new row.
template <typename T>
METSELECT_CLONES void exponentials(T* a, int64_t rows, int64_t classes, T* top, T* sum) {
  for (int64_t i = 0; i < rows; ++i, a += classes) {
    T largest = a[0];
#pragma omp simd reduction(max : largest)
    for (int64_t c = 1; c < classes; ++c) largest = a[c] > largest ? a[c] : largest;
    top[i] = largest;
    const T shift = largest == -std::numeric_limits<T>::infinity() ? T{0} : largest;
    T total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t c = 0; c < classes; ++c) {
      a[c] = exponential(a[c] - shift);
      total += a[c];
    }
    sum[i] = total;
  }
}

}  // namespace metselect
