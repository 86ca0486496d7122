// Rows of a layer picked by an index.
#pragma once

#include <vector>

#include "types.h"

namespace metselect {

// Picked rows of a matrix [N, D]; `rows` is null if all are picked in order.
template <typename T>
struct Picked {
  const T* data;
  int64_t stride;
  int64_t width;
  const int64_t* rows;

  Picked(const Tensor& h, const OptionalTensor& index)
      : data(h.const_data_ptr<T>()),
        stride(h.stride(0)),
        width(h.size(1)),
        rows(index ? index->const_data_ptr<int64_t>() : nullptr) {}

  int64_t number(int64_t i) const { return rows ? rows[i] : i; }
  const T* operator[](int64_t i) const { return data + number(i) * stride; }
};

// Adds `tile` [n, D] to the picked rows [start, start + n) of `into` [N, D].
template <typename T>
void add_rows(const T* tile, const Picked<T>& picked, int64_t start, int64_t n, T* into) {
  for (int64_t i = start; i < start + n; ++i) {
    T* out = into + picked.number(i) * picked.width;
    for (int64_t d = 0; d < picked.width; ++d) out[d] += *tile++;
  }
}

// Returns whether an index picks a row twice: two threads must not add to the same row.
inline bool has_duplicates(const OptionalTensor& index, int64_t rows) {
  if (!index) return false;
  std::vector<char> seen(rows, 0);
  const int64_t* numbers = index->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < index->size(0); ++i) {
    if (seen[numbers[i]]++) return true;
  }
  return false;
}

}  // namespace metselect
