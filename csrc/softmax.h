// exp(a - max) of rows and its sum, vectorised.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "types.h"

namespace metselect {

inline double exponential(double x) { return std::exp(x); }

// Returns e^x for x <= 0 within two units in the last place: 2^k times a polynomial in the rest,
// x - k ln 2, with |rest| <= ln 2 / 2. Results below the smallest normal number are 0.
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

// Reduces a row in eight lanes: an OpenMP simd reduction combines the lanes one by one.
template <typename T, typename Fold>
inline __attribute__((always_inline)) T fold(const T* a, int64_t n, T start, const Fold& with) {
  constexpr int64_t kLanes = 8;
  T lane[kLanes];
  for (int64_t k = 0; k < kLanes; ++k) lane[k] = start;
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) {
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) lane[k] = with(lane[k], a[d + k]);
  }
  for (; d < n; ++d) lane[0] = with(lane[0], a[d]);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) lane[k] = with(lane[k], lane[k + half]);
  }
  return lane[0];
}

template <typename T>
inline __attribute__((always_inline)) T largest(const T* a, int64_t n) {
  return fold(a, n, a[0], [](T x, T y) { return y > x ? y : x; });
}

// Replaces each row of a [rows, classes] by exp(a - top), with top its largest entry, or 0 if that
// is -inf; writes top and the sum of the new row.
template <typename T>
METSELECT_CLONES void exponentials(T* __restrict__ a, int64_t rows, int64_t classes,
                                   T* __restrict__ top, T* __restrict__ sum) {
  for (int64_t i = 0; i < rows; ++i) {
    T* row = a + i * classes;
    top[i] = largest(row, classes);
    const T shift = top[i] == -std::numeric_limits<T>::infinity() ? T{0} : top[i];
    for (int64_t c = 0; c < classes; ++c) row[c] -= shift;
  }
  for (int64_t k = 0; k < rows * classes; ++k) a[k] = exponential(a[k]);
  for (int64_t i = 0; i < rows; ++i) {
    sum[i] = fold(a + i * classes, classes, T{0}, [](T x, T y) { return x + y; });
  }
}

}  // namespace metselect
