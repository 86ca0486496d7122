// select_layer: (layer, class, score) of every node, tile by tile, all layers of a tile in turn.
//
// confidence, opposite: the log-odds a_y - logsumexp_{c != y} a_c of the linear logits
//   a_c = (h . K^-1 mu_c - mu_c K^-1 mu_c / 2) / T, with h and mu taken from the centre;
// distance: -|| R (h - mu_y) ||^2, where y is the label or, without labels, the best class.
// Nothing of size N x L x C is stored.

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <cmath>
#include <limits>

#include "metric.h"

namespace metselect {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Rule { kConfidence, kDistance, kOpposite };

Rule parse(c10::string_view rule) {
  if (rule == "confidence") return Rule::kConfidence;
  if (rule == "distance") return Rule::kDistance;
  TORCH_CHECK(rule == "opposite", "unknown rule ", rule);
  return Rule::kOpposite;
}

template <typename T>
struct Best {
  int64_t* layer;
  int64_t* answer;
  T* score;
  std::vector<T> rank;
};

// a_c of a tile: [rows, C] in `logits`, -inf where a class has no node.
void linear_logits(const Tensor& rows, const Metric& metric, const Tensor& valid,
                   double temperature, Tensor& logits) {
  at::addmm_out(logits, metric.offset, rows, metric.slope.t(), -1, 1);
  logits.masked_fill_(valid.logical_not(), -kInfinity).div_(temperature);
}

template <typename T>
T squared_distance(const T* z, const T* middle, int64_t width) {
  T sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += (z[d] - middle[d]) * (z[d] - middle[d]);
  return sum;
}

// Takes the asked class out of every row and writes the log-odds of it to `score`.
template <typename T>
void log_odds(Tensor& logits, const int64_t* asked, T* score) {
  const int64_t n = logits.size(0), classes = logits.size(1);
  T* a = logits.mutable_data_ptr<T>();
  std::vector<T> largest(n);
  for (int64_t i = 0; i < n; ++i) {
    T* row = a + i * classes;
    score[i] = row[asked[i]];
    row[asked[i]] = -std::numeric_limits<T>::infinity();
    largest[i] = *std::max_element(row, row + classes);
    if (std::isinf(largest[i])) continue;
    for (int64_t c = 0; c < classes; ++c) row[c] -= largest[i];
  }
  logits.exp_();
  for (int64_t i = 0; i < n; ++i) {
    T sum = 0;
    for (int64_t c = 0; c < classes; ++c) sum += a[i * classes + c];
    score[i] -= std::isinf(largest[i]) ? largest[i] : largest[i] + std::log(sum);
  }
}

template <typename T>
void share_of_nodes(const std::vector<Picked<T>>& layers, const std::vector<Metric>& metrics,
                    const Tensor& valid, const Tensor& temperature, const int64_t* labels,
                    Rule rule, int64_t begin, int64_t end, Best<T>& best) {
  const auto options = metrics[0].center.options();
  const int64_t classes = valid.size(0);
  int64_t widest = 0;
  for (const auto& h : layers) widest = std::max(widest, h.width);
  Tensor buffer = at::empty({kTile * widest}, options), whitened = at::empty_like(buffer);
  Tensor logits = at::empty({kTile, classes}, options);
  std::vector<int64_t> answer(kTile);
  std::vector<T> score(kTile);
  for (int64_t start = begin; start < end; start += kTile) {
    const int64_t n = std::min(end, start + kTile) - start;
    for (size_t depth = 0; depth < layers.size(); ++depth) {
      const Picked<T>& h = layers[depth];
      const Metric& metric = metrics[depth];
      Tensor space = buffer.narrow(0, 0, kTile * h.width).view({kTile, h.width});
      Tensor rows = centered(h, metric, start, start + n, space), a = logits.narrow(0, 0, n);
      linear_logits(rows, metric, valid, temperature[depth].item<double>(), a);
      const T* values = a.const_data_ptr<T>();
      for (int64_t i = 0; i < n; ++i) {
        const T* row = values + i * classes;
        answer[i] = std::max_element(row, row + classes) - row;
      }
      const int64_t* asked = labels ? labels + start : answer.data();
      if (rule == Rule::kDistance) {
        Tensor z = whitened.narrow(0, 0, n * h.width).view({n, h.width});
        at::mm_out(z, rows, metric.factor.t());
        for (int64_t i = 0; i < n; ++i) {
          score[i] =
              -squared_distance(z.const_data_ptr<T>() + i * h.width,
                                metric.middle.const_data_ptr<T>() + asked[i] * h.width, h.width);
        }
      } else {
        log_odds(a, asked, score.data());
      }
      for (int64_t i = 0; i < n; ++i) {
        const T signed_score = rule == Rule::kOpposite ? -score[i] : score[i];
        const T rank = metric.alive ? signed_score : -std::numeric_limits<T>::infinity();
        if (depth > 0 && !(rank > best.rank[start + i])) continue;
        best.rank[start + i] = rank;
        best.layer[start + i] = static_cast<int64_t>(depth);
        best.answer[start + i] = answer[i];
        best.score[start + i] = score[i];
      }
    }
  }
}

template <typename T>
void select(const std::vector<Tensor>& layers, const std::vector<Metric>& known,
            const Tensor& valid, const Tensor& temperature, const OptionalTensor& index,
            const OptionalTensor& labels, Rule rule, Tensor& layer, Tensor& answer, Tensor& score) {
  std::vector<Picked<T>> picked;
  for (const Tensor& h : layers) picked.emplace_back(h, index);
  const int64_t n = layer.size(0);
  Best<T> best{layer.mutable_data_ptr<int64_t>(), answer.mutable_data_ptr<int64_t>(),
               score.mutable_data_ptr<T>(), std::vector<T>(n)};
  const int64_t* truth = labels ? labels->const_data_ptr<int64_t>() : nullptr;
  over_shares(n, workers(n), [&](int64_t begin, int64_t end, int64_t) {
    share_of_nodes<T>(picked, known, valid, temperature, truth, rule, begin, end, best);
  });
}

std::tuple<Tensor, Tensor, Tensor> select_layer(TensorList layers, TensorList means,
                                                TensorList factors, const Tensor& valid,
                                                const Tensor& temperature,
                                                const OptionalTensor& index,
                                                const OptionalTensor& labels,
                                                c10::string_view rule) {
  check_layers(layers, means);
  if (index) check_numbers(*index, layers[0].size(0), "index");
  const int64_t n = picked_rows(layers, index);
  if (labels) {
    check_numbers(*labels, valid.size(0), "labels");
    TORCH_CHECK(labels->size(0) == n, "got ", labels->size(0), " labels for ", n, " rows");
  }
  const Tensor score = at::empty({n}, layers[0].options());
  Tensor layer = at::empty({n}, score.options().dtype(at::kLong)), answer = at::empty_like(layer);
  const std::vector<Metric> known = metrics(means, factors, valid);
  AT_DISPATCH_FLOATING_TYPES(score.scalar_type(), "select_layer", [&] {
    Tensor out = score;
    select<scalar_t>(unit_stride(layers), known, valid, temperature, index, labels, parse(rule),
                     layer, answer, out);
  });
  return {layer, answer, score};
}

}  // namespace

TORCH_LIBRARY_IMPL(metselect, CPU, m) { m.impl("select_layer", &select_layer); }

}  // namespace metselect
