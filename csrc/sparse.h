// Compressed sparse rows: checks, and division of rows among threads by their number of edges.
#pragma once

#include <limits>

#include "checks.h"
#include "threads.h"

namespace metselect {

// Checks that int32 numbers are in [0, limit), since kernels use them as offsets.
inline void check_small_numbers(const Tensor& value, int64_t limit, const char* name) {
  TORCH_CHECK(value.scalar_type() == at::kInt && value.dim() == 1 && value.is_contiguous(), name,
              " must be a contiguous int32 vector, got ", value.scalar_type(), " of shape ",
              value.sizes());
  const int32_t* number = value.const_data_ptr<int32_t>();
  const auto bound = static_cast<uint32_t>(
      std::min<int64_t>(limit, int64_t{std::numeric_limits<int32_t>::max()} + 1));
  at::parallel_for(0, value.size(0), 1 << 16, [&](int64_t begin, int64_t end) {
    uint32_t outside = 0;  // no early exit, so that the loop vectorises
    for (int64_t i = begin; i < end; ++i) outside |= static_cast<uint32_t>(number[i]) >= bound;
    for (int64_t i = begin; outside && i < end; ++i) {
      TORCH_CHECK_INDEX(static_cast<uint32_t>(number[i]) < bound, name, "[", i, "] is ", number[i],
                        ", expected 0 to ", limit - 1);
    }
  });
}

// Checks that indptr [rows + 1] rises from 0 to `edges`: row i has the edges indptr[i] to
// indptr[i + 1].
inline void check_indptr(const Tensor& indptr, int64_t rows, int64_t edges, const char* name) {
  TORCH_CHECK(indptr.scalar_type() == at::kLong && indptr.dim() == 1 && indptr.is_contiguous() &&
                  rows >= 0 && indptr.size(0) == rows + 1,
              name, " must be a contiguous int64 vector of ", rows + 1, " entries, got ",
              indptr.scalar_type(), " of shape ", indptr.sizes());
  const int64_t* start = indptr.const_data_ptr<int64_t>();
  TORCH_CHECK(start[0] == 0 && start[rows] == edges, name, " must go from 0 to the ", edges,
              " edges, got ", start[0], " to ", start[rows]);
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK(start[i] <= start[i + 1], name, "[", i + 1, "] is ", start[i + 1],
                ", less than the ", start[i], " before it");
  }
}

// Calls body(begin, end) on one contiguous share of the rows per thread. Shares have equal numbers
// of edges plus rows, since a few rows may have most of the edges.
template <typename Body>
void over_edge_shares(const int64_t* indptr, int64_t n, const Body& body) {
  const int64_t work = indptr[n] + n, shares = workers(work);
  const auto first_row = [&](int64_t share) {
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indptr[middle] + middle < work * share / shares) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  over_shares(shares, shares, [&](int64_t share, int64_t, int64_t) {
    body(first_row(share), first_row(share + 1));
  });
}

}  // namespace metselect
