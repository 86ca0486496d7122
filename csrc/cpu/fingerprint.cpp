// fingerprint: sum over i and j of (2 i + 1) w_j bits_ij, modulo 2^64; the sum over j modulo 2^32
// if the bits are 32-bit words. The weights w are odd, so that the change of one word is seen.

#include <ATen/ops/scalar_tensor.h>

#include <type_traits>
#include <vector>

#include "checks.h"
#include "threads.h"

namespace metselect {
namespace {

template <typename Word>
METSELECT_CLONES int64_t hash_rows(const Word* bits, const Word* weights, int64_t begin,
                                   int64_t end, int64_t width) {
  uint64_t total = 0;
  for (int64_t i = begin; i < end; ++i) {
    Word row = 0;
    for (int64_t j = 0; j < width; ++j) row += bits[i * width + j] * weights[j];
    const auto extended = static_cast<int64_t>(static_cast<std::make_signed_t<Word>>(row));
    total += static_cast<uint64_t>(2 * i + 1) * static_cast<uint64_t>(extended);
  }
  return static_cast<int64_t>(total);
}

template <typename Word>
int64_t hash(const Tensor& bits, const Tensor& weights) {
  const int64_t n = bits.size(0), width = bits.size(1), shares = workers(n);
  const auto* words = static_cast<const Word*>(bits.const_data_ptr());
  const auto* factors = static_cast<const Word*>(weights.const_data_ptr());
  std::vector<uint64_t> partial(shares);
  over_shares(n, shares, [&](int64_t begin, int64_t end, int64_t worker) {
    partial[worker] = hash_rows(words, factors, begin, end, width);
  });
  uint64_t total = 0;
  for (const uint64_t part : partial) total += part;
  return static_cast<int64_t>(total);
}

Tensor fingerprint(const Tensor& bits, const Tensor& weights) {
  TORCH_CHECK(bits.dim() == 2 && weights.dim() == 1 && weights.size(0) == bits.size(1),
              "bits has shape ", bits.sizes(), ", weights ", weights.sizes());
  const auto dtype = bits.scalar_type();
  TORCH_CHECK(dtype == weights.scalar_type() && (dtype == at::kLong || dtype == at::kInt),
              "bits and weights must both be int64 or int32, got ", dtype, " and ",
              weights.scalar_type());
  const Tensor words = bits.contiguous(), factors = weights.contiguous();
  const int64_t total =
      dtype == at::kLong ? hash<uint64_t>(words, factors) : hash<uint32_t>(words, factors);
  return at::scalar_tensor(total, at::kLong);
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("fingerprint", &fingerprint); }

}  // namespace metselect
